"""A run with a broken logger is refused at the start, not after engines and weights are loaded."""

import pytest
import wandb
from support.configs import compose

from verl_ext.driver.preflight.credentials import check_wandb
from verl_ext.driver.preflight.faults import Faults
from verl_ext.errors import BadConfig

VARIABLES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_DIR", "NETRC")
KEY = "0" * 40


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # wandb caches the values read
    yield
    wandb.teardown()


def check(loggers: str = "[console,wandb]") -> None:
    faults = Faults(compose("grpo", f"trainer.logger={loggers}"))
    faults.run(check_wandb)
    if faults.sentences:
        raise BadConfig(*faults.sentences)


def test_wandb_without_a_key_is_refused():
    with pytest.raises(
        BadConfig,
        match=r"^trainer\.logger=\['console', 'wandb'\] is not valid: wandb has no key for https://.*; run wandb "
        r"login, set WANDB_API_KEY or WANDB_MODE=offline, or use \[console,file\]$",
    ):
        check()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WANDB_MODE", "offline"), ("WANDB_API_KEY", KEY), ("WANDB_IDENTITY_TOKEN_FILE", "/run/token")],
)
def test_an_environment_with_a_key_or_without_a_server_is_not(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    check()


def test_a_key_that_cannot_be_one_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    with pytest.raises(BadConfig, match=r"wandb cannot log in \(WANDB_API_KEY invalid: ") as refused:
        check()
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("server", [wandb.Settings().base_url, "https://wandb.example.org:8443"])
def test_nor_what_wandb_login_has_written(server, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text(f"machine {server.removeprefix('https://')}\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("WANDB_BASE_URL", server)
    check()
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example.org")
    wandb.teardown()
    with pytest.raises(BadConfig, match="wandb has no key for https://other.example.org"):
        check()


def test_nor_what_wandb_offline_has_written(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    check()


def test_without_wandb_no_key_is_needed():
    check("[console,tensorboard]")
