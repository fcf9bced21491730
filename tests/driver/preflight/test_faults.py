"""Checks read the configuration's plain values, and find what OmegaConf finds."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from support.configs import compose

from verl_ext.driver.preflight.faults import Faults, RefusedKey
from verl_ext.driver.preflight.keys import OPTIONAL, REQUIRED

MISSING = "actor_rollout_ref.rollout.name"  # with hardware=verl
OTHERS = ("trainer", "trainer.logger", "rollout_policy.train_batch_size", "no", "no.such.key", "data.seed.below")


@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_the_values_are_those_of_omegaconf(engine):
    config = compose("hora", "hardware=verl", f"model_engine={engine}")
    faults = Faults(config)
    assert OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name")
    for key in (*REQUIRED, *OPTIONAL, *OTHERS[:-1], MISSING):
        assert faults[key] == OmegaConf.select(config, key), key
        assert (key in faults) == (OmegaConf.select(config, key, default=faults) is not faults), key
    assert faults[OTHERS[-1]] is None and OTHERS[-1] not in faults


def test_a_check_ends_where_it_reads_a_refused_key():
    faults, read = Faults(OmegaConf.create({"a": {"b": 1}, "c": "${a.b}"})), []
    faults.refuse_if(True, "a", "use 2")
    with pytest.raises(RefusedKey):
        faults["a.b"]
    faults.run(lambda each: read.append(each["a.b"]), lambda each: read.append(each["c"]))
    assert (read, faults.sentences) == ([1], ["a={'b': 1} is not valid: use 2"])
