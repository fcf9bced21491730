"""Secrets never reach logs."""

from __future__ import annotations

import pytest
from support.configs import changed, compose, good_overrides

from verl_ext.driver.preflight.validate import BadConfig, validate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY", "hush"),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN", "hush"),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.DB_PASSWORD", "hush"),
        ("+trainer.wandb_proxy", "http://me:hush@proxy:3128"),
        ("+trainer.secret", "hush"),
    ],
)
def test_a_secret_in_the_configuration_is_refused_without_being_shown(key, value, tmp_path):
    config = changed(compose("grpo", *good_overrides(tmp_path)), f"{key}={value}")
    with pytest.raises(BadConfig) as refusal:
        validate(config)
    assert key.removeprefix("+") in str(refusal.value) and "environment" in str(refusal.value)
    assert "hush" not in str(refusal.value)


def test_addresses_without_a_password_and_other_tokens_are_no_secrets(tmp_path):
    config = changed(compose("grpo", *good_overrides(tmp_path)), "+trainer.wandb_proxy=http://proxy:3128")
    validate(changed(config, "+trainer.eos_token=x", "+trainer.secret=null"))
