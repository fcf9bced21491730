"""Runs logged by verl's tensorboard logger."""

import json
import struct
import sys

import pytest
from support.commands import flat, invoke
from support.runs import training_steps, write_run
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from verl_ext.lab.report.command import main
from verl_ext.lab.report.events import event_files, read_events
from verl_ext.lab.report.runs import find_runs, names, read_run
from verl_ext.lab.report.summary import summarize

ACCURACY = "val-core/reasoning_gym/spell_backward/acc/mean@4"


@pytest.fixture
def track(monkeypatch):
    """verl's own loggers. Each call is one start of the run, and returns its event file."""

    def write(folder, steps, log=None):
        monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        before = set(event_files(folder))
        tracking = Tracking("project", "experiment", ["tensorboard", "file"] if log else ["tensorboard"])
        for step, data in steps.items():
            tracking.log(data, step)
        tracking.finish()
        (written,) = set(event_files(folder)) - before
        return written

    return write


def approximately(value):
    """The same to float32, at any depth."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=2e-7) if isinstance(value, float) else value


def test_both_loggers_of_a_run_give_the_same_report(tmp_path, track):
    steps = training_steps([0.5, None, 2 / 3, None, 0.7, 0.65], 4_000_003, seconds=1 / 3)
    for step, data in steps.items():
        data |= {"allocation/seconds": 0.01 * step, "rollouts/trained_total": 3_000_000.0 * step}
        data["perf/x"] = float("nan")
    track(tmp_path / "events" / "grpo", steps, log=tmp_path / "grpo.jsonl")
    logged, events = read_run([tmp_path / "grpo.jsonl"]), read_run([tmp_path / "events" / "grpo"])
    assert (events.name, events.steps, events.unread_bytes) == ("grpo", logged.steps, 0)
    assert events.metrics() == logged.metrics() == {name for data in steps.values() for name in data} - {"perf/x"}

    for target in (None, 0.7):
        expected, found = summarize([logged], target), summarize([events], target)
        assert expected["runs"][0].pop("skipped_values") == 0  # JSON has no NaN: orjson writes null
        assert found["runs"][0].pop("skipped_values") == 6
        assert found["notes"] == ["Values skipped because they are not finite: grpo 6."]
        del expected["notes"], found["notes"]
        assert found == approximately(expected)
        # Float32 stores 0.699999988: compared directly, the run would miss a target of 0.7.
        assert found["runs"][0]["to_target"]["step"] == 4 and found["runs"][0]["best_accuracy"] == 0.7


def test_counts_are_exact_up_to_what_float32_holds(tmp_path, track):
    counts = [1, 4_000_003, 2**24 - 1, 2**24, 2**24 + 1, 987_654_321, 123_456_789_012]
    track(tmp_path / "a", {step: {"tokens/sampled_total": float(count)} for step, count in enumerate(counts)})
    _, found = read_run([tmp_path / "a"]).series("tokens/sampled_total")
    assert found[:4].tolist() == counts[:4] and found[4] != counts[4]
    assert found[4:] == pytest.approx(counts[4:], rel=1.2e-7)


def test_a_run_that_was_resumed_in_its_folder(tmp_path, track):
    """Saved after step 2, killed in step 5; validates before continuing. Read the same as two .jsonl files."""
    first = training_steps([0.1, None, 0.2, 0.3, 0.9], 10)
    again = {2: {ACCURACY: 0.25}} | training_steps([0.35], 12, first=3)
    track(tmp_path / "grpo", first, log=tmp_path / "grpo.jsonl")
    track(tmp_path / "grpo", again, log=tmp_path / "grpo_resumed.jsonl")
    run = read_run([tmp_path / "grpo"])
    assert run == read_run([tmp_path / "grpo.jsonl", tmp_path / "grpo_resumed.jsonl"])
    assert run.steps == (0, 1, 2, 3) and run.series("rollouts/sampled_total")[1].tolist() == [10, 20, 36]
    assert run.records[2][ACCURACY] == 0.25 and run.records[2]["timing_s/step"] == 2.0


def test_a_step_that_is_trained_again_keeps_no_value_of_the_killed_process(tmp_path, track):
    """Each value is an event of its own: those before and after timing_s/step stay together."""
    step = {"before": 1.0, "timing_s/step": 2.0, "rollouts/sampled": 8.0, "after": 3.0}
    track(tmp_path / "a", {1: step, 2: step | {"stale": 9.0}})
    track(tmp_path / "a", {2: step, 3: step})
    assert read_run([tmp_path / "a"]).records == {1: step, 2: step, 3: step}


def test_files_go_by_when_they_were_begun_not_by_their_names(tmp_path, track):
    """Names end in seconds, host, process and a counter, none of them padded."""
    first = track(tmp_path / "a", {1: {"x": 1.0}, 2: {"x": 2.0}})
    again = track(tmp_path / "a", {2: {"x": 3.0}})
    first.rename(first.with_name("events.out.tfevents.1700000000.host.999.0"))
    again.rename(again.with_name("events.out.tfevents.1700000000.host.1000.0"))
    assert [path.name[-5:] for path in event_files(tmp_path / "a")] == ["000.0", "999.0"]
    assert read_run([tmp_path / "a"]).records == {1: {"x": 1.0}, 2: {"x": 3.0}}


def test_a_run_that_was_resumed_elsewhere(tmp_path, track):
    track(tmp_path / "a", {1: {"x": 1.0}, 2: {"x": 2.0}, 3: {"x": 9.0}})
    last = track(tmp_path / "b", {2: {"x": 3.0}})
    (parts,) = find_runs([f"{tmp_path / 'a'}+{last}"])
    run = read_run(parts, *names(parts[:1]))
    assert (run.name, run.steps, run.last("x")) == ("a", (1, 2), 3.0)


def test_samples_of_validations_are_left_out(tmp_path, track):
    track(tmp_path / "a", {1: {"x": 1.0}, 2: {"x": 2.0}})
    generations = ValidationGenerationsLogger("project", "experiment")
    generations.log(["tensorboard"], [["question", "answer", 1.0]], 1)
    generations.writer.close()
    assert len(event_files(tmp_path / "a")) == 2
    run = read_run([tmp_path / "a"])
    assert (run.steps, run.metrics(), run.unread_bytes) == ((1, 2), {"x"}, 0)


def test_a_folder_of_both(tmp_path, track):
    """Event files beside .jsonl files, and below, as verl nests project and experiment."""
    write_run(tmp_path / "hora_1.jsonl", [0.1], 10)
    write_run(tmp_path / "deeper" / "not_read.jsonl", [0.1], 10)
    track(tmp_path, {1: {"x": 1.0}})
    for name in ("qwen2.5_grpo_1", "qwen2.5_grpo_2"):
        track(tmp_path / "project" / name, {1: {"x": 1.0}})
        track(tmp_path / "project" / name, {2: {"x": 2.0}})
    runs = find_runs([str(tmp_path)])
    assert runs == [(tmp_path / "hora_1.jsonl",), (tmp_path,)] + [
        (tmp_path / "project" / f"qwen2.5_grpo_{seed}",) for seed in (1, 2)
    ]
    assert names([parts[0] for parts in runs]) == ["hora_1", tmp_path.name, "qwen2.5_grpo_1", "qwen2.5_grpo_2"]
    assert [read_run(parts).steps for parts in runs] == [(0,), (1,), (1, 2), (1, 2)]


def test_an_event_file_is_named_by_its_folder(tmp_path, track, monkeypatch):
    file = track(tmp_path / "v1.0", {1: {"x": 1.0}})
    monkeypatch.chdir(tmp_path / "v1.0")
    assert find_runs([str(file)]) == [(file,)]
    assert read_run([file]).name == read_run(find_runs(["."])[0]).name == "v1.0"


def test_names_that_would_be_the_same(tmp_path, track):
    write_run(tmp_path / "grpo.jsonl", [0.1], 10)
    track(tmp_path / "grpo", {1: {"x": 1.0}})
    paths = [parts[0] for parts in find_runs([str(tmp_path)])]
    assert names(paths) == [str(tmp_path / "grpo.jsonl"), str(tmp_path / "grpo")]


def test_a_file_that_is_cut_off_is_read_up_to_there(tmp_path, track):
    file = track(tmp_path / "a", training_steps([0.1, 0.2], 10))
    whole = file.read_bytes()
    for cut in (1, 5, 12, 30):
        file.write_bytes(whole[:-cut])
        run = read_run([tmp_path / "a"])
        assert run.steps == (0, 1) and "val-aux/reasoning_gym/spell_backward/acc/std@4" not in run.records[1]
        assert run.last("rollouts/sampled_total") == 10 and 0 < run.unread_bytes
        assert file.stat().st_size - run.unread_bytes == len(whole) - _last_record(whole)
    result = invoke(main, tmp_path / "a", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"from the first unfinished or damaged record on: a {run.unread_bytes}." in flat(result)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["runs"][0]["unread_bytes"] == run.unread_bytes


def test_unread_bytes_are_those_of_all_parts(tmp_path, track):
    parts, unread = [], 0
    for place, cut in ((1, 5), (2, 12)):
        file = track(tmp_path / str(place), {place: {"x": 1.0}, place + 1: {"x": 2.0}})
        data = file.read_bytes()
        file.write_bytes(data[:-cut])
        parts.append(file.parent)
        unread += _last_record(data) - cut
    run = read_run(parts)
    assert (run.steps, run.unread_bytes) == ((1, 2), unread)


def _last_record(data: bytes) -> int:
    """Bytes of the last record with its frame."""
    position = length = 0
    while position < len(data):
        length = struct.unpack_from("<Q", data, position)[0] + 16
        position += length
    return length


def test_what_follows_a_damaged_record_is_counted_and_a_later_file_read(tmp_path, track):
    file = track(tmp_path / "a", {step: {"x": float(step)} for step in range(1, 9)})
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    run = read_run([tmp_path / "a"])
    assert run.steps == tuple(range(1, run.steps[-1] + 1)) and run.steps[-1] < 8
    assert run.unread_bytes == (8 - run.steps[-1]) * _last_record(file.read_bytes()[: -run.unread_bytes])
    track(tmp_path / "a", {step: {"x": 2.0 * step} for step in (2, 3)})
    assert read_run([tmp_path / "a"]).series("x")[1].tolist() == [1, 4, 6]


@pytest.mark.parametrize("content", [b"", b"not an event file, though it is named like one", b"\x00" * 64, b"\xff" * 5])
def test_what_holds_no_step_is_refused_in_one_sentence(tmp_path, content):
    file = tmp_path / "a" / "events.out.tfevents.1700000000.host.1.0"
    file.parent.mkdir()
    file.write_bytes(content)
    for argument in (file, file.parent):
        result = invoke(main, argument, "--out", tmp_path / "out")
        assert result.exit_code == 2 and "Traceback" not in result.output
        with pytest.raises(ValueError, match=f"{argument.name}: holds no step of verl's tensorboard logger"):
            read_run([argument])


def test_a_record_that_is_no_event_ends_its_file(tmp_path):
    def damage():
        for file in event_files(tmp_path):
            with file.open("ab") as stream:
                RecordWriter(stream).write(b"\xff\xff\xff")

    SummaryWriter(str(tmp_path)).close()
    damage()
    with pytest.raises(ValueError, match="holds no step"):
        read_run([tmp_path])
    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("x", 1.0, 1)
    writer.close()
    damage()
    run = read_run([tmp_path])
    assert (run.steps, run.unread_bytes) == ((1,), 3 * (3 + 16))


def test_a_start_that_died_before_its_first_step_is_no_matter(tmp_path, track):
    track(tmp_path / "a", {1: {"x": 1.0}})
    SummaryWriter(str(tmp_path / "a")).close()
    (tmp_path / "a" / "events.out.tfevents.1800000000.host.1.0").touch()
    run = read_run([tmp_path / "a"])
    assert (run.records, run.unread_bytes) == ({1: {"x": 1.0}}, 0)


def test_what_is_named_twice_or_holds_none_is_refused(tmp_path, track):
    file = track(tmp_path / "a", {1: {"x": 1.0}})
    with pytest.raises(ValueError, match="named twice"):
        find_runs([str(file), str(tmp_path)])
    write_run(tmp_path / "b" / "b.jsonl", [0.1], 10)
    with pytest.raises(ValueError, match=r"b: the folder holds no event file"):
        find_runs([f"{tmp_path / 'a'}+{tmp_path / 'b'}"])
    with pytest.raises(ValueError, match="no such file"):
        find_runs([f"{tmp_path / 'a'}+"])
    (tmp_path / "none" / "events.out.tfevents.is.a.folder").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds no \.jsonl file and no event file"):
        find_runs([str(tmp_path / "none")])


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_events([tmp_path / "events.out.tfevents.gone"])


def test_without_the_package_a_sentence_says_so(tmp_path, track, monkeypatch):
    file = track(tmp_path / "a", {1: {"x": 1.0}})
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(ValueError, match=f"{file.name}: reading it takes the package tensorboard"):
        read_run([file])
