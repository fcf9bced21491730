"""Reading logs, also broken logs and logs of resumed runs."""

import json

import pytest
from support.runs import training_steps, write_log, write_run

from verl_ext.lab.report.runs import Run, by_method, find_runs, names, read_run, seed_of, without_seed


def test_a_killed_run_loses_only_its_last_line(tmp_path):
    run = read_run([write_run(tmp_path / "a.jsonl", [0.1, 0.2], 10, tail='{"step": 2, "data": {"val-core')])
    assert (run.name, run.steps, run.skipped_lines) == ("a", (0, 1), 1)
    assert run.last("rollouts/sampled_total") == 10


def test_skipped_lines_are_those_of_all_parts(tmp_path):
    parts = [
        write_run(tmp_path / "a.jsonl", [0.1, 0.2], 10, tail="{"),
        write_run(tmp_path / "b.jsonl", [0.3], 10, first=2),
    ]
    parts.append(write_run(tmp_path / "c.jsonl", [0.4], 10, first=3, tail='{\n{"step": 4}'))
    run = read_run(parts)
    assert (run.steps, run.skipped_lines) == ((0, 1, 2, 3), 3)


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"step": 2}', '{"step": "x", "data": {}}', '{"step": 2, "data": 3}',
                                  '{"step": Infinity, "data": {}}', "\x00\x00", "[" * 100_000])  # fmt: skip
def test_a_line_that_is_not_the_loggers_is_counted(tmp_path, line):
    path = write_run(tmp_path / "a.jsonl", [0.1, 0.2], 10)
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first}\n{line}\n{rest}")
    run = read_run([path])
    assert (run.steps, run.skipped_lines) == ((0, 1), 1)


@pytest.mark.parametrize("text", ["", "\n\n", "not a log\n", '{"step": 1, "da'])
def test_a_file_without_a_step_is_refused(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl: holds no step"):
        read_run([tmp_path / "a.jsonl"])


def test_a_start_that_died_before_its_first_step_is_skipped(tmp_path):
    """verl's file logger makes its file before the first step."""
    parts = [write_run(tmp_path / "a.jsonl", [0.1, 0.2], 10), tmp_path / "a-restart-1.jsonl"]
    parts[1].write_text("")
    write_run(tmp_path / "a-restart-2.jsonl", [0.3], 10, first=2)
    run = read_run(*find_runs([str(parts[0])]))
    assert (run.steps, run.empty_parts) == ((0, 1, 2), ("a-restart-1.jsonl",))
    parts[0].write_text("")
    run = read_run(*find_runs([str(tmp_path)]))
    assert (run.name, run.steps, run.empty_parts) == ("a", (2,), ("a.jsonl", "a-restart-1.jsonl"))


def test_files_of_a_folder_without_a_step_are_skipped(tmp_path):
    run, skipped = write_run(tmp_path / "a.jsonl", [0.1], 10), []
    (tmp_path / "record.jsonl").write_text('{"event": "run"}\n')
    (tmp_path / "record-restart-1.jsonl").write_text("")
    assert find_runs([str(tmp_path)], skipped.append) == [(run,)]
    assert skipped == [tmp_path / "record.jsonl"]
    run.unlink()
    with pytest.raises(ValueError, match=r"no \.jsonl file of the folder holds a step"):
        find_runs([str(tmp_path)])


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\x89PNG\xff\xfe\n\x00")
    with pytest.raises(ValueError, match="holds no step"):
        read_run([tmp_path / "a.jsonl"])


def test_values_that_are_not_finite_or_no_numbers_are_left_out(tmp_path):
    data = {"a": float("nan"), "b": float("inf"), "c": 10**400, "d": "text", "e": True, "f": None, "g": 1}
    run = read_run([write_log(tmp_path / "a.jsonl", {1: data})])
    assert (run.records, run.skipped_values) == ({1: {"g": 1.0}}, 3)
    parts = [write_log(tmp_path / f"{place}.jsonl", {place: {"g": 1}, place + 1: data}) for place in (1, 2)]
    assert read_run(parts).skipped_values == 6


def test_the_later_file_of_a_resumed_run_wins(tmp_path):
    """Saved after step 2, killed in step 5; the resumed run validates first."""
    first = write_run(tmp_path / "a.jsonl", [0.1, None, 0.2, 0.3, 0.9], 10)
    again = write_log(
        tmp_path / "b.jsonl",
        {2: {"val-core/x/acc/mean@1": 0.25}} | training_steps([0.35, 0.4], 12, first=3),
    )
    run = read_run([first, again])
    assert (run.name, run.steps, run.replaced_records) == ("a", (0, 1, 2, 3, 4), 2)  # of steps 3 and 4
    steps, rollouts = run.series("rollouts/sampled_total")
    assert steps.tolist() == [1, 2, 3, 4] and rollouts.tolist() == [10, 20, 36, 48]
    assert run.records[2]["val-core/x/acc/mean@1"] == 0.25 and run.records[2]["timing_s/step"] == 2.0


def test_what_a_resumed_run_has_not_reached_again_is_gone(tmp_path):
    first = write_run(tmp_path / "a.jsonl", [0.1] * 9, 10)
    again = write_run(tmp_path / "b.jsonl", [0.2, 0.2], 10, first=3)
    run = read_run([first, again])
    assert (run.steps, run.replaced_records) == ((0, 1, 2, 3, 4), 6)
    run = read_run([again, first])  # in the wrong order
    assert (run.steps, run.replaced_records) == (tuple(range(9)), 2)


@pytest.mark.parametrize("of_training", ["timing_s/step", "rollouts/sampled"])
def test_a_step_that_is_trained_again_keeps_no_metric_of_the_killed_process(tmp_path, of_training):
    """The killed process discarded in step 2, and the resumed run never does. Late validations add to the record."""
    step, late = {of_training: 1.0}, {"val-core/x/acc/mean@1": 0.5}
    parts = [write_log(tmp_path / "a.jsonl", {1: step, 2: step | {"rollouts/discarded_stale_total": 30.0}})]
    parts.append(write_log(tmp_path / "b.jsonl", {2: step, 3: step}))
    parts.append(write_log(tmp_path / "c.jsonl", {3: late}))
    assert read_run(parts).records == {1: step, 2: step, 3: step | late}


def test_the_validation_of_a_step_stays_beside_its_training_record(tmp_path):
    lines = [{"val-core/x/acc/mean@1": 0.5}, {"timing_s/step": 2.0}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"step": 1, "data": data}) + "\n" for data in lines))
    run = read_run([path])
    assert run.records == {1: lines[0] | lines[1]} and run.replaced_records == 0


def test_one_file_that_goes_back_is_read_like_two(tmp_path):
    first, again = (
        write_run(tmp_path / "a.jsonl", [0.1] * 5, 10),
        write_run(tmp_path / "b.jsonl", [0.2] * 2, 10, first=2),
    )
    both = tmp_path / "both.jsonl"
    both.write_text(first.read_text() + again.read_text())
    assert read_run([both]).records == read_run([first, again]).records


def test_series_and_level(tmp_path):
    run = read_run([write_log(tmp_path / "a.jsonl", {1: {"a": 1}, 2: {"b": 5}, 4: {"b": 7}, 5: {"a": 2}})])
    steps, values = run.series("b")
    assert steps.tolist() == [2, 4] and values.tolist() == [5, 7]
    assert run.level("b").tolist() == [0, 5, 7, 7]
    assert run.series("c")[0].size == 0 and (run.last("a"), run.last("b"), run.last("c")) == (2, 7, None)
    assert run.metrics() == {"a", "b"}


def test_files_folders_and_parts(tmp_path):
    for name in ("x/b.jsonl", "x/a.jsonl", "y.jsonl", "z.jsonl"):
        write_run(tmp_path / name, [0.1], 10)
    (tmp_path / "x" / "a.log").write_text("no run")
    arguments = [str(tmp_path / "x"), f"{tmp_path / 'y.jsonl'}+{tmp_path / 'z.jsonl'}"]
    assert [[path.name for path in files] for files in find_runs(arguments)] == [
        ["a.jsonl"], ["b.jsonl"], ["y.jsonl", "z.jsonl"],
    ]  # fmt: skip


def test_files_of_restarts_join_their_run_in_order(tmp_path):
    """As the driver and examples/slurm/train.sbatch name them."""
    files = ["pilot.jsonl", "pilot-restart-2.jsonl", "pilot-restart-10.jsonl"]
    for first, name in enumerate([*files, "pilot_1.jsonl", "lost-restart-1.jsonl"]):
        write_run(tmp_path / name, [0.1 * first], 10, first=3 * first)
    found = find_runs([str(tmp_path)])
    assert [[path.name for path in parts] for parts in found] == [["lost-restart-1.jsonl"], files, ["pilot_1.jsonl"]]
    for named in (files[:1], files, files[::-1]):
        assert find_runs([str(tmp_path / name) for name in named]) == [found[1]]
    assert read_run(found[1]).steps == (0, 3, 6) and read_run(found[1]).name == "pilot"
    assert [group.name for group in by_method([read_run(parts) for parts in found])] == ["lost-restart-1", "pilot"]


def test_a_plus_in_a_name_is_a_plus(tmp_path):
    path = write_run(tmp_path / "a+b.jsonl", [0.1], 10)
    assert find_runs([str(path)]) == [(path,)]


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    path = write_run(tmp_path / "a.jsonl", [0.1], 10)
    with pytest.raises(ValueError, match="no such file"):
        find_runs([str(tmp_path / "none.jsonl")])
    with pytest.raises(ValueError, match="no such file"):
        find_runs([f"{path}+"])
    with pytest.raises(ValueError, match="named twice"):
        find_runs([str(path), str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="named twice"):
        find_runs([str(path), "a.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no .jsonl"):
        find_runs([str(tmp_path / "empty")])


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_run([tmp_path / "none.jsonl"])


def test_steps_share_the_names_of_their_metrics(tmp_path):
    run = read_run([write_log(tmp_path / "a.jsonl", {step: {"actor/loss": 0.1} for step in (1, 2)})])
    assert len({id(name) for data in run.records.values() for name in data}) == 1


def test_lines_are_split_where_json_lets_them(tmp_path):
    """U+2028 is a line break to str.splitlines, and may stand in a JSON string."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"step": 1, "data": {"a\u2028b": 1}}, ensure_ascii=False) + "\n")
    assert read_run([tmp_path / "a.jsonl"]).records == {1: {"a\u2028b": 1.0}}


# ---- names and seeds ----


def groups(*run_names):
    found = by_method([Run(name, {0: {}}) for name in run_names])
    return {method.name: [run.name for run in method.runs] for method in found}


def test_runs_that_differ_by_their_seed_are_one_method():
    assert groups("grpo_1", "pilot_commit_1", "grpo_2", "pilot_commit_12") == {
        "grpo": ["grpo_1", "grpo_2"],
        "pilot_commit": ["pilot_commit_1", "pilot_commit_12"],
    }


@pytest.mark.parametrize("form", ["_{}", "_s{}", "-s{}", "_seed{}", "-seed{}", "_seed_{}", "-Seed_{}", "_S{}"])
def test_forms_of_seeds(form):
    run_names = [f"grpo{form.format(seed)}" for seed in (1, 12)]
    assert groups(*run_names) == {"grpo": run_names} and [seed_of(name) for name in run_names] == [1, 12]


@pytest.mark.parametrize("name", ["grpo", "grpo-3", "grpo3", "grpos3", "s3", "_s", "grpo_seed", "grpo_v3", "seed_3b"])
def test_a_name_without_a_seed(name):
    assert seed_of(name) is None and without_seed(name) == name


def test_a_folder_per_seed(tmp_path):
    paths = [tmp_path / folder / f"{name}.jsonl" for folder in ("seed1", "Seed_2") for name in ("grpo", "hora_3")]
    assert names(paths) == ["grpo_seed1", "seed1/hora_3", "grpo_Seed_2", "Seed_2/hora_3"]
    assert groups(*names(paths)[::2]) == {"grpo": ["grpo_seed1", "grpo_Seed_2"]}
    assert names(paths[:2]) == ["grpo_seed1", "hora_3"]


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
