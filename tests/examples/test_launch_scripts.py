"""Every launch script composes with every choice in its paper, is valid, and fits its own GPUs.

A stand-in for Python prints the arguments that a script gives to Python. The tests compose and validate these
arguments, because a dry run of each script would cost seconds. A real dry run shows that both ways give the same
configuration.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from support import configs
from support.configs import write_rows
from support.launch_scripts import EXAMPLES, ROOT, SCRIPTS, asked, composed, dry_run, resolved, run_script

from verl_ext.data.catalog import CATALOG
from verl_ext.driver.preflight.validate import validate
from verl_ext.hardware.megatron import Megatron, megatron_use
from verl_ext.hardware.memory import GPU_MEMORY, TRAINING_SHARE, USABLE, Settings, use
from verl_ext.hardware.shapes import SHAPES
from verl_ext.launch import experiment_hardware

CHOICES = {
    "pilot_commit": [{}, {"N": "16"}],
    "grpo": [{}, {"N": "16"}],
    "dapo": [{}, {"N": "16"}],
    "hora": [{}, {"RECIPE": "grpo"}, {"ESTIMATOR": "rloo"}, {"ESTIMATOR": "rloo", "RECIPE": "grpo"}],
    "vip": [
        {"N": n, "ESTIMATOR": estimator, "RECIPE": recipe}
        for n in ("16", "8")
        for estimator in ("rloo", "dr_grpo")
        for recipe in ("vip", "grpo")
    ],
    "knapsack": [{"N": n, "RECIPE": recipe} for n in ("4", "8", "16") for recipe in ("knapsack", "grpo")]
    + [{"ESTIMATOR": "reinforce_plus_plus"}, {"ESTIMATOR": "reinforce_plus_plus", "RECIPE": "grpo"}],
    "prefix_sampling": [{}, {"BASELINE": "1"}],
}
ALL = [
    pytest.param(script, choice, id="-".join([script, *choice.values()]))
    for script in SCRIPTS
    for method, choices in CHOICES.items()
    if script.startswith(f"{method}_")
    for choice in choices
]


def covered(script: str, choice: dict[str, str]) -> list[tuple[str, ...]]:
    """Keys of the settings that this case covers. Only the first case of each key is validated.

    A baseline differs from its method in the policy and in names only (test_experiments.py). A choice of VIP or
    Knapsack-RL sets the same keys for every model (train.sh); the first choice, with which each model is validated, has
    another number of rollouts than the model's file, so the file and the choice are both in effect.
    """
    method, values = script.partition("_")[0], tuple(choice.values())
    if method in ("grpo", "dapo") or choice.get("RECIPE") == "grpo":
        return [(method, "baseline")]
    return [(script,), (method, *values)] if method in ("vip", "knapsack") else [(script, *values)]


VALIDATED = {proven: case.values for case in reversed(ALL) for proven in covered(*case.values)}.values()
LONGEST = {"1_5b": 2048 + 8192, "4b": 2048 + 4096, "8b": 2048 + 4096, "14b": 2048 + 4096}


@pytest.fixture(scope="module")
def local_tools(tmp_path_factory) -> dict[str, str]:
    """TOOLS of the agents' scripts: the tests have no container runtime, and a run's first sandbox is tried."""
    file = tmp_path_factory.mktemp("tools") / "tools.yaml"
    classes = (f"verl_ext.driver.tools.shell.{name}" for name in ("ShellTool", "SubmitTool"))
    config = {"type": "native", "deployment": {"type": "local"}}
    file.write_text(yaml.safe_dump({"tools": [{"class_name": name, "config": config} for name in classes]}))
    return {"TOOLS": str(file)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """Rows with tests for the tool ``submit`` of the agents' scripts."""
    path = write_rows(tmp_path_factory.mktemp("data") / "rows.parquet", 512)
    written = pq.read_table(path).to_pylist()
    for row in written:
        row["extra_info"] = {"tools_kwargs": {"submit": {"create_kwargs": {"test_command": "true"}}}}
    pq.write_table(pa.Table.from_pylist(written), path)
    return str(path)


# ---- all of them ----


@pytest.mark.parametrize(("script", "choice"), ALL)
def test_it_is_valid_and_fits(script, choice, rows, local_tools):
    tools = local_tools if script.endswith("_swe") else {}
    config = composed(script, TRAIN_FILES=rows, VAL_FILES=rows, **tools, **choice)
    if (script, choice) in VALIDATED:
        validate(config)

    model, rollout, actor = (config.actor_rollout_ref[name] for name in ("model", "rollout", "actor"))
    shape, memory = SHAPES[model.path], GPU_MEMORY[config.hardware_name]
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    longest = config.data.max_prompt_length + config.data.max_response_length
    chosen = Settings(
        rollout.tensor_model_parallel_size,
        rollout.gpu_memory_utilization,
        actor.ppo_max_token_len_per_gpu,
        rollout.log_prob_max_token_len_per_gpu,
        actor.fsdp_config.ulysses_sequence_parallel_size,
        actor.fsdp_config.param_offload,
    )
    held = use(shape, memory, gpus, longest, chosen)
    assert held.fullest <= USABLE * memory and held.sequences >= 8
    assert longest <= chosen.ppo_max_token_len_per_gpu * chosen.sequence_parallel
    assert longest <= chosen.log_prob_max_token_len_per_gpu * chosen.sequence_parallel
    positions = model.override_config.get("max_position_embeddings", shape.positions)
    assert longest <= positions
    if positions != shape.positions:
        assert rollout.engine_kwargs.vllm.hf_overrides == {"max_position_embeddings": positions}
        assert json.loads(rollout.engine_kwargs.sglang.json_model_override_args) == {
            "max_position_embeddings": positions
        }
    assert gpus % chosen.tensor_parallel == gpus % chosen.sequence_parallel == 0
    assert config.data.train_batch_size * rollout.n % gpus == 0


# GRPO's and DAPO's scripts differ from Pilot-Commit's in the policy and in names only: test_experiments.py.
@pytest.mark.parametrize("script", [script for script in SCRIPTS if not script.startswith(("grpo_", "dapo_"))])
def test_it_is_valid_and_fits_with_megatron(script, rows, local_tools):
    small = ("hora_qwen2_5_1_5b", "hora_qwen2_5_3b")  # the paper's 3 GPUs are no multiple of TP 2
    gpus = {"GPUS_PER_NODE": "4"} if script in small else {}
    tools = local_tools if script.endswith("_swe") else {}
    config = composed(script, "model_engine=megatron", TRAIN_FILES=rows, VAL_FILES=rows, **tools, **gpus)
    validate(config)

    model, rollout, actor = (config.actor_rollout_ref[name] for name in ("model", "rollout", "actor"))
    memory, gpus = GPU_MEMORY[config.hardware_name], config.trainer.nnodes * config.trainer.n_gpus_per_node
    longest = config.data.max_prompt_length + config.data.max_response_length
    context = actor.megatron.context_parallel_size
    chosen = Settings(
        rollout.tensor_model_parallel_size,
        rollout.gpu_memory_utilization,
        actor.ppo_max_token_len_per_gpu,
        rollout.log_prob_max_token_len_per_gpu,
        context,
        actor.megatron.param_offload,
    )
    sizes = Megatron(actor.megatron.tensor_model_parallel_size, context, actor.megatron.param_offload)
    held = megatron_use(SHAPES[model.path], memory, gpus, longest, chosen, sizes)
    assert held.fullest <= USABLE * memory
    assert held.training_state + max(held.update, held.log_probs) <= TRAINING_SHARE * memory
    assert longest <= context * min(chosen.ppo_max_token_len_per_gpu, chosen.log_prob_max_token_len_per_gpu)
    assert gpus % (sizes.tensor_parallel * context) == 0
    assert SHAPES[model.path].key_value_heads % sizes.tensor_parallel == 0
    if script.startswith("hora_"):
        assert (actor.optim.lr_decay_style, actor.optim.clip_grad) == ("linear", 1.0)  # the paper's


def test_every_run_has_checkpoints_and_logs_of_its_own():
    runs = {}
    for script, choice in (case.values for case in ALL):
        config = resolved(script, **choice)
        folder = config["trainer"]["default_local_dir"]
        assert "file" in config["trainer"]["logger"]  # which is written into this folder
        assert config["trainer"]["rollout_data_dir"] == f"{folder}/rollouts"
        assert runs.setdefault(folder, config) == config
    assert len(runs) == len(ALL)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_three_lines_that_name_the_file_of_its_settings(script):
    path = EXAMPLES / f"run_{script}.sh"
    recipe, (experiment, *_) = asked(script)
    file = f"recipe/{recipe}/config/experiment/{experiment.removeprefix('experiment=')}.yaml"
    shebang, comment, command = path.read_text().splitlines()
    assert shebang == "#!/usr/bin/env bash" and comment.endswith(f": {file}") and command.startswith("exec ")
    assert path.stat().st_mode & 0o111, f"{path.name} is not executable"
    # The launcher reads the hardware profile from the file, before hydra composes.
    assert experiment_hardware(recipe, [experiment]) == resolved(script)["hardware_name"]


def test_every_experiment_is_that_of_a_script_or_its_baseline():
    started = {
        (recipe, overrides[0]) for recipe, overrides in (asked(s, **c) for s, c in (case.values for case in ALL))
    }
    files = [file for file in ROOT.glob("recipe/*/config/experiment/*.yaml") if not file.stem.startswith("_")]
    assert started == {(file.parts[-4], f"experiment={file.stem}") for file in files}


# ---- choices of the user ----


def test_arguments_win_on_either_side_of_the_flags():
    code, output, errors = dry_run(
        "pilot_commit_qwen3_8b",
        "trainer.nnodes=2",
        "hardware=b200",
        "--cfg",
        "job",
        "--resolve",
        "model_size=14b",
        "rollout_policy.n_pilot=8",
        "trainer.logger=[console]",
        HARDWARE="a800",
        NNODES="4",
    )
    assert code == 0, errors
    config = yaml.safe_load(output)
    assert config["trainer"]["nnodes"] == 2
    assert config["trainer"]["logger"] == ["console"]
    assert (config["hardware_name"], config["model_size"]) == ("b200", "14b")
    assert config["actor_rollout_ref"]["rollout"]["n"] == 8 + 48
    assert config["trainer"]["experiment_name"] == "pilot_commit_qwen3_8b_n56"


@pytest.mark.parametrize(("script", "choice"), [("prefix_sampling_qwen3_32b_swe", {}), ("dapo_qwen3_8b", {"N": "16"})])
def test_a_dry_run_shows_the_same(script, choice):
    code, output, errors = dry_run(script, "--cfg", "job", "--resolve", DATA_DIR="/data", **choice)
    assert code == 0, errors
    assert_same(output, resolved(script, **choice))


def test_a_real_dry_run_shows_the_same():
    script, choice = "vip_qwen2_5_math_7b", {"RECIPE": "grpo"}
    result = run_script(script, sys.executable, "--cfg", "job", "--resolve", DATA_DIR="/data", **choice)
    assert result.returncode == 0, result.stderr
    assert_same(result.stdout, resolved(script, **choice))


def assert_same(output: str, expected: dict) -> None:
    assert yaml.safe_load(output) | {"recipe": expected["recipe"]} == expected


def test_the_environment_is_honoured_from_any_folder(tmp_path):
    environment = {
        "NNODES": "1",
        "GPUS_PER_NODE": "4",
        "HARDWARE": "a800",
        "MODEL_PATH": "/models/lr=1e-6, own (2)",
        "MODEL_SIZE": "14b",
        "TRAIN_FILES": "[/data/one.parquet,/data/two.parquet]",
        "VAL_FILES": "/data/val.parquet",
        "CHECKPOINT_DIR": "/checkpoints",
    }
    config = resolved("grpo_qwen3_8b", folder=tmp_path, **environment)
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (1, 4)
    assert (config["hardware_name"], config["model_size"]) == ("a800", "14b")
    assert config["actor_rollout_ref"]["model"]["path"] == "/models/lr=1e-6, own (2)"
    assert config["data"]["train_files"] == ["/data/one.parquet", "/data/two.parquet"]
    assert config["data"]["val_files"] == "/data/val.parquet"
    assert config["trainer"]["default_local_dir"] == "/checkpoints/grpo_qwen3_8b"


def test_data_and_checkpoints_are_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = resolved("vip_llama3_2_3b", DATA_DIR="")
    assert config["data"]["train_files"] == "/home/someone/data/dapo_math_17k_worked_example.parquet"
    assert config["trainer"]["default_local_dir"] == "checkpoints/vip_llama3_2_3b_dapo_math_rloo_n8"
    elsewhere = resolved("vip_llama3_2_3b", DATA_DIR="/shared", CHECKPOINT_DIR="/shared/runs")
    assert elsewhere["data"]["val_files"] == [f"/shared/aime{year}_worked_example.parquet" for year in (24, 25)]
    assert elsewhere["trainer"]["default_local_dir"] == "/shared/runs/vip_llama3_2_3b_dapo_math_rloo_n8"


@pytest.mark.parametrize("script", ["pilot_commit_qwen3_8b", "hora_qwen2_5_3b", "prefix_sampling_qwen3_8b"])
@pytest.mark.parametrize("hardware", ["cpu", "verl"])
def test_profiles_without_model_sizes_take_scripts_too(script, hardware):
    assert resolved(script, HARDWARE=hardware)["hardware_name"] == hardware


def test_another_size_or_profile_replaces_that_of_the_script():
    config = resolved("hora_qwen2_5_3b", "model_size=8b", "hardware=b200", "rollout_policy.G0=4")
    assert (config["model_size"], config["hardware_name"]) == ("8b", "b200")
    assert config["rollout_policy"]["G0"] == 4


def test_tools_and_lengths_of_the_user(tmp_path):
    tools = tmp_path / "tools.yaml"
    tools.touch()
    arguments = ("hardware=h200", "rollout_policy.sides=hard")
    config = resolved("prefix_sampling_qwen3_14b_swe", *arguments, TOOLS=str(tools), NNODES="8")
    assert (config["hardware_name"], config["rollout_policy"]["sides"]) == ("h200", "hard")
    assert config["actor_rollout_ref"]["rollout"]["multi_turn"]["tool_config_path"] == str(tools)
    assert config["trainer"]["nnodes"] == 8
    assert resolved("knapsack_llama3_1_8b", LENGTH="8192")["data"]["max_response_length"] == 8192 - 2048


@pytest.mark.parametrize("name", ["knapsack_qwen2_5_math_7b", "knapsack_qwen2_5_math_7b_deepscaler"])
def test_a_longer_run_has_as_many_positions_and_a_folder_of_its_own(name):
    short, long = resolved(name), resolved(name, LENGTH="8192")
    for config, positions in ((short, 6144), (long, 8192)):
        model = config["actor_rollout_ref"]["model"]["override_config"]
        engine = config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["hf_overrides"]
        assert model["max_position_embeddings"] == engine["max_position_embeddings"] == positions
    assert long["trainer"]["default_local_dir"] == short["trainer"]["default_local_dir"] + "_response6144"


@pytest.mark.parametrize(
    "name",
    ["pilot_commit_qwen2_5_math_1_5b", "vip_qwen2_5_math_1_5b", "vip_qwen2_5_math_7b", "prefix_sampling_qwen3_32b_swe"],
)
def test_raised_positions_follow_the_length_of_responses(name):
    config = resolved(name, "data.max_response_length=100000")
    positions = {"max_position_embeddings": config["data"]["max_prompt_length"] + 100000}
    engines = config["actor_rollout_ref"]["rollout"]["engine_kwargs"]
    assert config["actor_rollout_ref"]["model"]["override_config"].items() >= positions.items()
    assert engines["vllm"]["hf_overrides"] == json.loads(engines["sglang"]["json_model_override_args"]) == positions


@pytest.mark.parametrize(
    ("script", "name", "value", "valid"),
    [
        ("grpo_qwen3_8b", "N", "48", "use 128, 64 or 16, the paper's, or 32"),
        ("pilot_commit_qwen3_8b", "N", "48", "use 128, 64 or 16, the paper's, or 32"),
        ("hora_qwen2_5_3b", "N", "16", "the paper has one budget; for another, pass actor_rollout_ref.rollout.n=16"),
        ("hora_qwen2_5_3b", "RECIPE", "dapo", "use hora, or grpo for the baseline"),
        ("vip_llama3_2_3b", "RECIPE", "dapo", "use vip, or grpo for the baseline"),
        ("knapsack_llama3_1_8b", "RECIPE", "dapo", "use knapsack, or grpo for the baseline"),
        ("hora_qwen2_5_3b", "ESTIMATOR", "gae", "use grpo or rloo"),
        ("vip_llama3_2_3b", "ESTIMATOR", "gae", "use rloo or dr_grpo"),
        ("knapsack_llama3_1_8b", "ESTIMATOR", "gae", "use grpo or reinforce_plus_plus"),
        ("dapo_qwen3_8b", "ESTIMATOR", "rloo", "the paper has one; for another, pass algorithm.adv_estimator=rloo"),
        ("dapo_qwen3_8b", "BASELINE", "1", "the baseline is another recipe, use RECIPE=grpo"),
        ("vip_llama3_2_3b", "LENGTH", "4096", "pass data.max_response_length"),
        ("knapsack_llama3_1_8b", "LENGTH", "8k", "use a number of tokens above 2048"),
        ("knapsack_llama3_1_8b", "LENGTH", "-1", "use a number of tokens above 2048"),
        ("knapsack_llama3_1_8b", "LENGTH", "2048", "use a number of tokens above 2048"),
        ("prefix_sampling_qwen3_8b", "BASELINE", "yes", "use 1 for the matched baseline, or 0"),
        ("prefix_sampling_qwen3_14b_swe", "BASELINE", "grpo", "use 1 for the matched baseline, or 0"),
        ("prefix_sampling_qwen3_8b", "RECIPE", "grpo", "the baseline is this recipe without prefixes, use BASELINE=1"),
        (
            "prefix_sampling_qwen3_14b_swe",
            "TOOLS",
            "/nowhere.yaml",
            "name a file of tools, like examples/swe_tools.yaml",
        ),
    ],
)
def test_a_value_that_is_not_known_is_refused_with_the_valid_ones(script, name, value, valid):
    result = run_script(script, "false", **{name: value})
    assert (result.returncode, result.stderr) == (2, f"error: {name}={value} is not valid: {valid}\n")


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (
            ["pilot_commit"],
            {},
            "pilot_commit is not valid: quickstart.sh takes no arguments, set MODEL, OUT, BUDGET or SEEDS before bash",
        ),
        ([], {"MODEL": "large"}, "MODEL=large is not valid: use small, smollm2 or agent"),
        ([], {"BUDGET": "1e4"}, "BUDGET=1e4 is not valid: use a number of rollouts"),
        ([], {"AT_ONCE": "0"}, "AT_ONCE=0 is not valid: use a number of runs"),
        *(
            ([], {"SEEDS": seeds}, f"SEEDS={seeds} is not valid: use different numbers from 1 on, such as '1 2 3'")
            for seeds in ("1,2", "08", "2 2")
        ),
    ],
)
def test_the_quickstart_refuses_before_it_installs(arguments, variables, sentence):
    command = ["bash", str(EXAMPLES / "quickstart.sh"), *arguments]
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "python", "sentence"),
    [
        ([], "true", "name a recipe and an experiment: train.sh pilot_commit qwen3_8b [key=value ...]"),
        (["grpo"], "true", "name a recipe and an experiment: train.sh pilot_commit qwen3_8b [key=value ...]"),
        (["grop", "qwen3_8b"], "true", f"recipe=grop is not valid: name a folder in {ROOT / 'recipe'}"),
        *(
            (
                ["grpo", "qwen3_8b"],
                python,
                f"PYTHON={python} is not valid: it cannot be started; activate the environment, or set PYTHON",
            )
            for python in ("/no/python", "/tmp", "nopython")
        ),
    ],
)
def test_a_script_that_cannot_start_says_why(arguments, python, sentence, tmp_path):
    command = ["bash", str(EXAMPLES / "train.sh"), *arguments]
    environment = os.environ | {"PYTHON": python}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {sentence}\n")


def test_the_first_run_without_an_environment_says_what_to_do():
    script = ["bash", str(EXAMPLES / "first_run.sh"), "--help"]
    result = subprocess.run(script, env=os.environ | {"PYTHON": "nopython"}, capture_output=True, text=True)
    sentence = "PYTHON=nopython is not valid: it cannot be started; activate the environment, or set PYTHON"
    assert (result.returncode, result.stderr) == (2, f"error: {sentence}\n")


@pytest.mark.parametrize("command", [("train.sh", "pilot_commit", "qwen3_8b"), ("first_run.sh",)])
def test_the_checkout_of_the_script_is_run_where_cd_looks_in_other_folders(command, tmp_path):
    """If CDPATH is set, `cd` prints the name of the folder."""
    (tmp_path / "python").write_text("#!/usr/bin/env bash\nprintenv PYTHONPATH\n")
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "CDPATH": ".:/", "PYTHONPATH": ""}
    script = ["bash", f"examples/{command[0]}", *command[1:]]
    result = subprocess.run(script, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == f"{EXAMPLES}/..\n", result.stderr


def test_a_recipe_of_the_current_folder_is_started(tmp_path):
    (tmp_path / "recipe/mine").mkdir(parents=True)
    command = ["bash", str(EXAMPLES / "train.sh"), "mine", "own"]
    result = subprocess.run(command, env=os.environ | {"PYTHON": "echo"}, cwd=tmp_path, capture_output=True, text=True)
    assert "-m recipe.mine experiment=own" in result.stdout


def test_an_unknown_model_size_is_answered_with_those_there_are():
    sentence = "error: model_size=7b is not valid: use one of 14b, 1_5b, 32b, 4b, 8b\n"
    assert dry_run("grpo_qwen3_8b", "--cfg", "job", "model_size=7b") == (2, "", sentence)


# ---- rewards, data, hardware profiles ----


@pytest.mark.parametrize("script", SCRIPTS)
def test_answers_are_judged_by_math_verify(script):
    """The verifier is math_reward, HORA's reward (which calls math_reward), or, for agents, the task's own tests."""
    module = {"hora": "think_answer_reward", "swe": "swe_reward"}
    expected = next((reward for word, reward in module.items() if word in script), "math_reward")
    assert resolved(script)["reward"]["custom_reward_function"]["path"] == f"pkg://verl_ext.data.{expected}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_data_are_files_that_are_prepared_under_that_name(script):
    data = resolved(script)["data"]
    wordings = ("", "_think_answer", "_worked_example")
    prepared = {f"/data/{data.file}{wording}.parquet" for data in CATALOG.values() for wording in wordings}
    prepared |= {"/data/r2e_gym/train.parquet", "/data/r2e_gym/validation.parquet"}
    prepared |= {f"/data/{data.file}_sample100.parquet" for data in CATALOG.values() if data.split == "validation"}
    prepared |= {f"/data/{data.file}_repeat32.parquet" for data in CATALOG.values() if data.split == "validation"}
    prepared |= {f"/data/{data.held_out_file}.parquet" for data in CATALOG.values() if data.held_out_file}
    prepared |= {"/data/ace_reason_math_subset.parquet"}  # verl-ext data curate
    validation = data["val_files"]
    assert {data["train_files"], *([validation] if isinstance(validation, str) else validation)} <= prepared


@cache
def profile(*overrides: str) -> DictConfig:
    config = configs.compose("grpo", *overrides)
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize("size", LONGEST)
@pytest.mark.parametrize("hardware", GPU_MEMORY)
def test_profiles_compose_and_their_numbers_fit(hardware, size):
    config = profile(f"hardware={hardware}", f"model_size={size}")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    table = config.hardware_profile[size]
    assert (config.hardware_name, config.model_size) == (hardware, size)
    assert rollout.tensor_model_parallel_size == table.tensor_parallel
    assert rollout.gpu_memory_utilization == table.gpu_memory_utilization
    assert actor.ppo_max_token_len_per_gpu == table.ppo_max_token_len_per_gpu
    assert rollout.log_prob_max_token_len_per_gpu == table.log_prob_max_token_len_per_gpu
    assert actor.fsdp_config.ulysses_sequence_parallel_size == table.sequence_parallel
    assert actor.fsdp_config.param_offload == actor.fsdp_config.optimizer_offload == table.offload
    assert actor.strategy == actor.fsdp_config.strategy == "fsdp2" and rollout.name == "vllm"
    assert config.actor_rollout_ref.model.use_remove_padding and rollout.dtype == "bfloat16"

    assert 8 % rollout.tensor_model_parallel_size == 0
    assert LONGEST[size] <= actor.ppo_max_token_len_per_gpu <= rollout.log_prob_max_token_len_per_gpu
