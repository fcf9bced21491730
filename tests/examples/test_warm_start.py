"""The warm start of the quickstart's words: the mix of examples, and its refusals."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from verl_ext.data import reasoning_gym
from verl_ext.data.levels import write_splits

FILE = Path(__file__).parents[2] / "examples" / "quickstart" / "warm_start.py"
spec = importlib.util.spec_from_file_location("quickstart_warm_start", FILE)
warm_start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(warm_start)

app = typer.Typer()
app.command()(warm_start.main)


@pytest.fixture
def words(tmp_path):
    """The options of a small warm start on words of 3, 4 and 5 letters."""
    texts = [f"spell_backward:min_word_len={letters},max_word_len={letters}" for letters in (3, 4, 5)]
    levels = [reasoning_gym.parse_level(text, place) for place, text in enumerate(texts)]
    write_splits(reasoning_gym.splits(levels, {"train": 24, "validation": 6}, 0), tmp_path / "data")
    sizes = ["--steps", "2", "--batch", "4", "--hidden", "32", "--layers", "1"]
    return ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "model"), *sizes]


def test_examples_come_from_the_levels_in_the_given_proportion(words, tmp_path, monkeypatch):
    collect, lengths = warm_start.collect, []

    def collect_and_note(*arguments):
        pairs = collect(*arguments)
        lengths.append(Counter(len(answer) for _, answer in pairs))
        return pairs

    monkeypatch.setattr(warm_start, "collect", collect_and_note)
    result = CliRunner().invoke(app, [*words, "--examples", "3,0,1", "--silent", "0.99"])
    assert result.exit_code == 0, result.output
    assert lengths[0] == {3: 6, 5: 2}  # 2 steps of 4
    assert len(lengths[1]) == 3  # the top-up has examples of all levels
    assert json.loads((tmp_path / "model" / "warm_start.json").read_text())["examples"] == "3,0,1"
    shutil.rmtree(tmp_path / "model")
    assert CliRunner().invoke(app, [*words, "--examples", "3,0,1", "--silent", "1"]).exit_code == 0
    assert len(lengths) == 3  # without a top-up, there are no examples for it


@pytest.mark.parametrize("text", ["1,2", "1,2,3,4", "0,0,0", "1,x,2", "1,-1,2", ""])
def test_other_examples_are_refused_before_the_model_is_made(words, tmp_path, text):
    result = CliRunner().invoke(app, [*words, "--examples", text], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and f"--examples={text} is not valid: use" in result.output, result.output
    assert not (tmp_path / "model").exists()
