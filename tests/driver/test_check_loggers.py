"""A run that would fail at its logger, with engines and weights already up, does not start."""

import pytest
from support.configs import compose

from verl_ext.driver.bad_config import BadConfig
from verl_ext.driver.check_loggers import check_loggers

VARIABLES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC")


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def check() -> None:
    check_loggers(compose("grpo", "trainer.logger=[console,wandb]"))


def test_wandb_without_a_key_is_refused():
    with pytest.raises(
        BadConfig, match=r"^trainer\.logger=\['console', 'wandb'\] is not valid: wandb has no key; run wandb"
    ):
        check()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WANDB_MODE", "offline"), ("WANDB_API_KEY", "0" * 40), ("WANDB_IDENTITY_TOKEN_FILE", "/run/token")],
)
def test_an_environment_with_a_key_or_without_a_server_is_not(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    check()


def test_nor_what_wandb_login_has_written(monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password 0000\n")
    check()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(BadConfig, match="wandb has no key"):
        check()


def test_without_wandb_no_key_is_needed():
    check_loggers(compose("grpo", "trainer.logger=[console,tensorboard]"))
