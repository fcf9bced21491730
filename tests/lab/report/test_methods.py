"""Names and seeds."""

import pytest

from verl_ext.lab.report.methods import by_method, names
from verl_ext.lab.report.runs import Run


def groups(*run_names):
    found = by_method([Run(name, (0,), ({},)) for name in run_names])
    return {method.name: [run.name for run in method.runs] for method in found}


def test_runs_that_differ_by_their_seed_are_one_method():
    assert groups("grpo_1", "pilot_commit_1", "grpo_2", "pilot_commit_12") == {
        "grpo": ["grpo_1", "grpo_2"],
        "pilot_commit": ["pilot_commit_1", "pilot_commit_12"],
    }


@pytest.mark.parametrize(
    "run_names", [("grpo_1", "dapo_1"), ("grpo", "pilot_commit"), ("_1",), ("qwen3_8b", "qwen3_4b")]
)
def test_a_number_that_is_alone_or_no_seed_stays(run_names):
    assert groups(*run_names) == {name: [name] for name in run_names}


def test_runs_of_the_same_name_get_their_folders(tmp_path):
    paths = [tmp_path / "one" / "grpo.jsonl", tmp_path / "two" / "grpo.jsonl", tmp_path / "dynamic_sampling.jsonl"]
    assert names(paths) == ["one/grpo", "two/grpo", "dynamic_sampling"]


def test_seeds_of_one_folder_stay_together(tmp_path):
    paths = [tmp_path / folder / f"grpo_{seed}.jsonl" for folder, seed in (("one", 1), ("two", 1), ("two", 2))]
    assert names(paths) == ["one/grpo_1", "two/grpo_1", "two/grpo_2"]
    assert groups(*names(paths)) == {"one/grpo_1": ["one/grpo_1"], "two/grpo": ["two/grpo_1", "two/grpo_2"]}


def test_folders_of_the_same_name_get_their_paths(tmp_path):
    paths = [tmp_path / "one" / "out" / "grpo.jsonl", tmp_path / "two" / "out" / "grpo.jsonl"]
    assert names(paths) == [str(path.with_suffix("")) for path in paths]
