"""The command line of the recipes: mistakes are answered in one sentence, and everything else is hydra's."""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import ray
import yaml
from support.commands import run_recipe
from support.configs import compose, good_overrides

from verl_ext import launch
from verl_ext.driver.preflight.credentials import check_wandb
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.keys import check_names
from verl_ext.new import write


@pytest.fixture
def run(monkeypatch, tmp_path):
    """``python -m recipe.pilot_commit <arguments>``: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(launch.FULL_ERROR, raising=False)
    return partial(run_recipe, "pilot_commit")


PROFILES, GPUS = "a100, a800, b200, cpu, h100, h200, verl", "h100, h200, a100, a800, b200"
NEW = " (put + in front to add a new key)"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["rollout_policy.n_pilots=3"],
            f"rollout_policy.n_pilots is not a key: did you mean rollout_policy.n_pilot?{NEW}",
        ),
        (
            ["experiment=qwen3_8b", "hardware=cpu", "rollout_policy.n_pilots=3"],
            f"rollout_policy.n_pilots is not a key: did you mean rollout_policy.n_pilot?{NEW}",
        ),
        (["n_pilot=3"], f"n_pilot is not a key: did you mean rollout_policy.n_pilot?{NEW}"),
        (["hardwre=h200"], f"hardwre is not a key: did you mean hardware?{NEW}"),
        (["zzz=1"], f"zzz is not a key: --cfg job prints all keys{NEW}"),
        (["~data.seedx"], "data.seedx is not a key: did you mean data.seed?"),
        (["hardware=h300"], f"hardware=h300 is not valid: use one of {PROFILES}"),
        (["--cfg", "job", "hardware=h300"], f"hardware=h300 is not valid: use one of {PROFILES}"),
        (
            ["hardware=h200", "model_size=7b"],
            "model_size=7b is not valid: use one of 14b, 1_5b, 32b, 4b, 8b",
        ),
        (
            ["hardware=h200", "model_engine=veomni"],
            "model_engine=veomni is not valid: the profiles of GPUs have no settings for it, use dp, megatron, or "
            "hardware=verl",
        ),
        (["model_size=8b"], f"model_size is not valid here: only the profiles hardware={GPUS} have it"),
        (["data.seed"], "data.seed is not valid: write key=value; quote special characters: \"key='a, b'\""),
        (
            ["actor_rollout_ref.actor.optim={lrr: 1}"],
            "actor_rollout_ref.actor.optim lacks an entry of the given value: put + in front to add new entries",
        ),
        (["--multirun", "data.sed=1,2"], f"data.sed is not a key: did you mean data.seed?{NEW}"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_in_one_sentence(run, arguments, sentence):
    assert run(*arguments) == (2, "", f"error: {sentence}\n")


def test_a_configuration_that_is_no_yaml_is_named(run, tmp_path, monkeypatch):
    made = write("no_yaml", tmp_path)
    (made / "config" / "no_yaml.yaml").write_text("a: [1\nb: {\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    code, _, error = run_recipe("no_yaml", "--cfg", "job")
    assert code == 2 and error.startswith("error: while parsing a flow") and error.count("\n") == 1
    assert f"{made}/config/no_yaml.yaml" in error


def test_hydras_own_hints_are_kept(run):
    code, _, error = run("data.seed=1,2")
    assert code == 2 and error.startswith("error: Ambiguous value") and error.count("\n") == 1
    assert run("+data.seed=1")[2].endswith("'++data.seed=1'\n")


def test_hydras_flags_work(run):
    code, printed, _ = run("--cfg", "job", "rollout_policy.n_pilot=3", "+trainer.mine=4")
    config = yaml.safe_load(printed)
    assert (code, config["rollout_policy"]["n_pilot"], config["trainer"]["mine"]) == (0, 3, 4)
    assert launch.FULL_ERROR not in os.environ
    assert "hardware: cpu" in run("--info", "defaults-tree")[1]
    assert "--multirun" in run("--hydra-help")[1]
    assert run("-h") == run("--help")


def test_the_configuration_is_composed_without_importing_verl():
    """Importing verl, torch and ray takes most of the time in which a mistake is found."""
    code = "import sys; sys.argv[1:] = ['--cfg', 'job']; from verl_ext.launch import main; main('grpo'); "
    code += "print({'verl', 'torch', 'ray'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("model_engine: dp\n") and result.stdout.endswith("set()\n")


def test_check_makes_the_checks_of_a_run_prints_its_first_lines_and_starts_nothing(run, tmp_path):
    given = good_overrides(tmp_path)
    code, printed, told = run("--check", *given)
    lines = told.splitlines()
    assert (code, printed) == (0, "")  # verl says that its own checks have passed, before others have run
    assert lines[0].startswith("pilot_commit: a step samples ")
    assert lines[-1] == "No fault was found, and --check starts no training."
    assert not ray.is_initialized()
    assert run(*given, "rollout_policy.p_upper=2", "trainer.nnodes=0", "--check") == (
        2,
        "",
        "error: trainer.nnodes=0 is not valid: use an integer of at least 1\n"
        "error: rollout_policy.p_upper=2 is not valid: it must be a success rate in [0, 1]\n",
    )


def test_the_user_can_ask_for_a_traceback(run, monkeypatch):
    monkeypatch.setenv(launch.FULL_ERROR, "1")
    with pytest.raises(importlib.import_module("hydra.errors").ConfigCompositionException):
        run("rollout_policy.n_pilots=3")


def test_the_command_itself_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "recipe.grpo", "rollout_policy.nn=3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    sentence = "rollout_policy.nn is not a key: did you mean rollout_policy.n?"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {sentence}{NEW}\n")


def test_the_nearest_key_is_near_as_a_whole_and_in_its_last_part():
    known = ["rollout_policy.s", "actor.rollout.n", "rollout_policy.n_pilot", "actor.optim.lr"]
    assert launch.nearest("rollout_policy.n", known) == "actor.rollout.n"
    assert launch.nearest("optim.lr", known) == "actor.optim.lr"
    assert launch.nearest("nothing.like_these", known) is None
    assert launch.nearest("s", []) is None


def test_the_last_choice_of_a_group_wins_and_flags_come_apart():
    given = ["hardware=cpu", "data.seed=1", "--cfg", "job", "hardware=h200", "~data.x", "model_engine=dp"]
    overrides, flags = launch.arranged([*given, "data.seed=2", "--config-dir=x"])
    assert overrides == ["hardware=h200", "model_engine=dp", "data.seed=1", "~data.x", "data.seed=2"]
    assert flags == ["--cfg", "job", "--config-dir=x"]
    assert launch.chosen(given, "hardware", "a100") == "h200" and launch.chosen(["a=b=c"], "a", "") == "b=c"
    assert launch.chosen([], "hardware", "a100") == "a100"


@pytest.mark.parametrize(
    ("arguments", "of_experiment", "found"),
    [
        ([], None, []),
        (["hardware=h200"], None, []),
        (["hardware=h200", "model_engine=megatron"], None, ["actor_engine=megatron"]),
        (["model_engine=megatron"], "h200", ["actor_engine=megatron"]),
        (["hardware=h200", "model_engine=megatron", "actor_engine=dp"], None, []),
        (["model_engine=megatron"], None, []),
        (["hardware=cpu"], "h200", ["+model_size=[]", "model_size=[]"]),
        (["hardware=cpu", "model_size=8b"], "h200", ["+model_size=[]"]),
    ],
)
def test_overrides_that_follow_from_the_users(arguments, of_experiment, found):
    assert launch.implied(arguments, of_experiment) == found


def test_variables_of_a_profile_do_not_replace_the_users(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    launch.export_environment("no such profile")
    assert "VERL_PLATFORM" not in os.environ
    launch.export_environment("cpu")
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VERL_PLATFORM"]) == ("3", "cpu")


def test_a_run_on_the_cpu_asks_nobody_for_a_key(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    config = compose("grpo")
    assert list(config.trainer.logger) == ["console", "file"]
    faults = Faults(config)
    faults.run(check_names, check_wandb)
    assert not faults.sentences


def test_garbage_is_collected_still_but_rarely():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        launch.collect_rarely()
        assert gc.isenabled() and gc.get_threshold() == launch.THRESHOLDS
    finally:
        gc.set_threshold(*before)


def test_the_end_of_a_process_searches_for_no_garbage():
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
    code += "from verl_ext.launch import collect_rarely; collect_rarely()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "True\n", result.stderr


def test_rays_workers_on_a_cpu_do_so_too_and_import_nothing_heavy_for_it():
    hook = compose("grpo").ray_kwargs.ray_init.runtime_env.worker_process_setup_hook
    module, name = hook.rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is launch.collect_rarely
    code = f"import sys, {module}; assert not {{'hydra', 'omegaconf', 'yaml', 'numpy'}} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


WARNINGS = """
import warnings
for engine in ("veomni", "megatron"):
    warnings.warn(f"{engine} engine is not available: x")
"""


@pytest.mark.parametrize(("used", "warned"), [("dp", []), ("megatron", ["megatron", "megatron"])])
def test_verls_warnings_of_missing_engines_are_ignored_in_all_processes(used, warned):
    """All but the warning of the engine in use; a filter of the user stays."""
    code = f"""
import os, subprocess, sys
from verl_ext.launch import ignore_missing_engines
ignore_missing_engines({used!r})
assert os.environ["PYTHONWARNINGS"].startswith("ignore::SyntaxWarning,")
{WARNINGS}
subprocess.run([sys.executable, "-c", {WARNINGS!r}], check=True)
"""
    environment = os.environ | {"PYTHONWARNINGS": "ignore::SyntaxWarning"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stderr
    assert re.findall("UserWarning: (.*) engine is not available", said) == warned
