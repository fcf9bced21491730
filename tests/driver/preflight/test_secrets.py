"""Secrets never reach logs."""

from __future__ import annotations

import pytest
from support.configs import changed, compose, good_overrides

from verl_ext.driver.preflight.credentials import secrets
from verl_ext.driver.preflight.validate import BadConfig, validate

HUSH = "hushhushhushhushhushhushhushhushhushhush"
BY_NAME = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "GITHUB_TOKEN",
    "AWS_SESSION_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "DB_PASSWORD",
    "SMTP_PASS",
    "passwd",
    "passphrase",
    "private_key",
    "ssh-key",
    "apiKey",
    "accessToken",
    "authTokens",
    "client_secret",
    "Authorization",
    "token",
)
BY_VALUE = (
    "http://me:hush@proxy:3128",
    "redis://:hush@host/0",
    "https://hush@proxy",
    "git+https://hush@example.org/repository.git",
    "me:hush@proxy:3128",
    "https://example.org/file?version=2&token=hush",
    "sk-proj-hush",
    f"sk-{HUSH}",
    "sk-ant-api03-hush",
    f"hf_{HUSH}",
    f"ghp_{HUSH}",
    f"github_pat_{HUSH}",
    f"glpat-{HUSH}",
    "AKIAHUSHHUSHHUSHHUSH",
    f"AIza{HUSH}",
    f"xoxb-{HUSH}",
    f"--header 'Authorization: Bearer {HUSH}'",
    f"eyJ{HUSH}.eyJ{HUSH}.{HUSH}",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nhush",
)
NO_SECRETS = {
    "http_proxy": "http://proxy:3128",
    "data": "abfss://container@account.dfs.core.windows.net/train.parquet",
    "repository": "git+ssh://git@example.org/repository.git",
    "image": "python:3.11@sha256:9af3c2",
    "eos_token": "<|im_end|>",
    "end_of_answer_token": "</answer>",
    "answer_token": "####",
    "judge_api_key": "EMPTY",
    "stop_token": "end of the answer",
    "max_tokens": 4096,
    "token_level": "sequence",
    "private_key": "/run/keys/id_rsa",
    "GOOGLE_APPLICATION_CREDENTIALS": "~/keys/service.json",
    "PWD": "/home/me",
    "HF_TOKEN": None,
    "password": "",
    "use_password": True,
    "secret": False,
    "skipped": "sk-learn-like-features-of-prompts",
    "prompt_key": "prompt",
    "monkey": "see",
    "url": "https://example.org/page?key_words=2&tokens=3",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose("grpo", *good_overrides(tmp_path_factory.mktemp("secrets")))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY", "hush"),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN", "hush"),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.DB_PASSWORD", "60457"),
        ("+trainer.wandb_proxy", "http://me:hush@proxy:3128"),
        ("+trainer.secret", "hush"),
        ("trainer.experiment_name", "sk-proj-hush"),
        ("+trainer.api_keys", "[hush, hush]"),
        ("+trainer.credentials", "{user: me, more: {word: hush}}"),
    ],
)
def test_a_secret_in_the_configuration_is_refused_without_being_shown(key, value, config):
    with pytest.raises(BadConfig) as refusal:
        validate(changed(config, f"{key}={value}"))
    assert key.removeprefix("+") in str(refusal.value) and "environment" in str(refusal.value)
    assert "hush" not in str(refusal.value) and "60457" not in str(refusal.value)


def test_a_secret_from_the_environment_is_refused_because_verl_prints_resolved_values(config, monkeypatch):
    monkeypatch.setenv("MINE", "hush")
    with pytest.raises(BadConfig, match=r"^trainer\.secret holds a secret"):
        validate(changed(config, "+trainer.secret=${oc.env:MINE}"))
    monkeypatch.delenv("MINE")
    validate(changed(config, "+trainer.secret=${oc.env:MINE,null}"))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_secret_is_known_by_its_name(name):
    assert [sentence.split(" ")[0] for sentence in secrets({"a": {name: "hush"}})] == [f"a.{name}"]
    assert [sentence.split(" ")[0] for sentence in secrets({name: ["hush", None]})] == [f"{name}[0]"]


@pytest.mark.parametrize("value", BY_VALUE)
def test_a_secret_is_known_by_its_form(value):
    assert [sentence.split(" ")[0] for sentence in secrets({"a": [{"b": value}]})] == ["a[0].b"]


@pytest.mark.parametrize("name", ["password", "DB_PASSWORD", "secret", "api_key"])
def test_a_password_may_be_a_number(name):
    assert len(secrets({name: 60457})) == 1
    assert secrets({name: True}) == secrets({name: None}) == []


@pytest.mark.parametrize("name", NO_SECRETS)
def test_other_values_are_no_secrets(name):
    assert secrets({"section": {name: NO_SECRETS[name]}}) == []
