"""Packages that a configuration needs: named with the key that needs them and the script that installs them."""

from __future__ import annotations

import json
import sys

import pytest
from support.configs import compose

from verl_ext.driver.preflight import packages
from verl_ext.driver.preflight.keys import ATTENTION
from verl_ext.driver.preflight.packages import missing_models, missing_packages, needed_modules

METADATA = "Metadata-Version: 2.1\nName: trl\nVersion: 1.16.0\n"
SEPARATE = "trainer.v1.trainer_mode=separate_async"
JUDGE = "reward.reward_model.rollout.name=sglang"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
MEGATRON = ["model_engine=megatron", "actor_engine=megatron"]


def modules(*overrides: str) -> set[str]:
    return {module for _, _, module in needed_modules(compose("grpo", *overrides))}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["hardware=cpu"], {"vllm"}),
        (["hardware=cpu", SEPARATE, f"{BACKEND}=gloo"], {"vllm"}),
        (["hardware=h200"], {"vllm", "flash_attn"}),
        (["hardware=h200", "actor_rollout_ref.rollout.name=sglang"], {"sglang", "flash_attn"}),
        (["hardware=h200", JUDGE, "reward.reward_model.enable=true"], {"vllm", "sglang", "flash_attn"}),
        (["hardware=cpu", JUDGE, "reward.reward_model.enable=true"], {"vllm", "sglang"}),
        (["hardware=h200", JUDGE], {"vllm", "flash_attn"}),
        (["hardware=verl", "actor_rollout_ref.rollout.name=vllm"], {"vllm", "flash_attn"}),  # verl's own attention
        (
            ["hardware=verl", "actor_rollout_ref.rollout.name=vllm", f"++{ATTENTION}=null"],
            {"vllm"},
        ),  # its own choice
        (["hardware=h200", "actor_rollout_ref.model.override_config.attn_implementation=sdpa"], {"vllm"}),
        (["hardware=h200", f"{BACKEND}=nccl"], {"vllm", "flash_attn"}),  # the GPUs are shared: no transfer
        (["hardware=h200", SEPARATE, f"{BACKEND}=nccl"], {"vllm", "flash_attn", "cupy"}),
        (["hardware=h200", SEPARATE, f"{BACKEND}=mooncake"], {"vllm", "flash_attn", "mooncake"}),
        (["hardware=b200", *MEGATRON], {"vllm", "megatron.core", "megatron.bridge"}),
        (
            ["hardware=b200", *MEGATRON, "actor_rollout_ref.actor.megatron.vanilla_mbridge=true"],
            {"vllm", "megatron.core", "mbridge"},
        ),
    ],
)
def test_the_modules_that_verl_will_import(overrides, expected):
    assert modules(*overrides) == expected


def test_a_missing_package_is_named_with_its_key_and_its_installer(monkeypatch):
    config = compose("grpo", "hardware=h200", SEPARATE, f"{BACKEND}=nccl")
    monkeypatch.setattr(packages, "is_installed", lambda module: module != "cupy")
    assert missing_packages(config) == [
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl needs the package cupy, which is not installed: "
        "bash examples/install_gpu.sh."
    ]


@pytest.mark.parametrize(
    ("where", "refused"), [(None, True), ("__init__.py", False), ("experimental/ppo/__init__.py", False)]
)
def test_a_trl_without_verls_class_is_refused(where, refused, tmp_path, monkeypatch):
    assert packages.conflicting_packages() == []
    files = {"trl/__init__.py": "", "trl/experimental/__init__.py": "", "trl-1.16.0.dist-info/METADATA": METADATA}
    if where:
        files[f"trl/{where}"] = f"{packages.VALUE_HEAD} = None"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        expected = "trl 1.16.0 is installed and has no AutoModelForCausalLMWithValueHead, which verl imports: "
        assert [each.startswith(expected) for each in packages.conflicting_packages()] == [True] * refused
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
            del sys.modules[name]


def test_a_package_within_a_package_that_is_missing_is_missing():
    assert packages.is_installed("importlib.metadata")
    assert not packages.is_installed("importlib.nothing") and not packages.is_installed("nothing_here.core")


def test_verls_own_engines_need_the_listed_modules():
    """An import error of each engine names the module; cupy and the others are not installed here."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    errors = {name: str(error) for name, error in CheckpointEngineRegistry._import_errors.items()}
    assert "cupy" in errors["nccl_checkpoint_engine"] and "mooncake" in errors["mooncake_checkpoint_engine"]


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("path", "config.json"),
        ("tokenizer_path", "tokenizer_config.json"),
        ("lora_adapter_path", "adapter_config.json"),
    ],
)
def test_a_model_that_the_offline_hubs_cache_lacks_is_named(key, file, tmp_path, monkeypatch):
    hub = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": True}
    for name, value in hub.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    own = () if key == "path" else (f"actor_rollout_ref.model.path={tmp_path}",)  # a folder
    config = compose("grpo", *own, f"actor_rollout_ref.model.{key}=someone/some_model")
    assert missing_models(config) == [
        f"actor_rollout_ref.model.{key}=someone/some_model is not valid: with HF_HUB_OFFLINE=1 it must be in the cache "
        f"HF_HOME={tmp_path}; hf download someone/some_model"
    ]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert missing_models(config) == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tmp_path / "hub/models--someone--some_model"
    (model / "snapshots/abc").mkdir(parents=True)
    (model / "snapshots/abc" / file).touch()
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    if key == "path":
        (model / "snapshots/abc/model.safetensors").touch()
    assert missing_models(config) == []


def test_a_model_without_all_its_weights_in_the_offline_hubs_cache_is_named(tmp_path, monkeypatch):
    """`verl-ext hardware` and an interrupted download leave its config.json."""
    hub = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": True}
    for name, value in hub.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    config = compose("grpo", "actor_rollout_ref.model.path=someone/some_model")
    model = tmp_path / "hub/models--someone--some_model"
    snapshot = model / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    parts = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    index = json.dumps({"weight_map": {"a": parts[0], "b": parts[1], "c": parts[1]}})
    refused = [
        "actor_rollout_ref.model.path=someone/some_model is not valid: with HF_HUB_OFFLINE=1 all its weights must be "
        f"in the cache HF_HOME={tmp_path}; hf download someone/some_model"
    ]
    for name, text in (("config.json", ""), (parts[0], ""), ("model.safetensors.index.json", index)):
        (snapshot / name).write_text(text)
        assert missing_models(config) == refused
    (snapshot / parts[1]).touch()
    assert missing_models(config) == []
