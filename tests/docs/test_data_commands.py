"""Pages with a launch script's data: their commands write every file that the script reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.configs import compose

from verl_ext.data.prepare import DATA_SETS, _files

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"verl-ext data (\$?\w+) ([^;\n]*)")
LOOP = re.compile(r"for name in ([\w ]+); do ([^\n]*); done")


def written(block: str) -> Iterator[str]:
    """Stems of the parquet files that the commands of a bash block write."""
    block = LOOP.sub(lambda loop: "; ".join(loop[2].replace("$name", name) for name in loop[1].split()), block)
    for name, options in COMMAND.findall(block):
        chosen = dict(re.findall(r"--(prompt|sample|repeat) (\w+)", options))
        prompt, sample, repeat = (chosen.get(option) for option in ("prompt", "sample", "repeat"))
        yield from (file.stem for file in _files(DATA_SETS[name], Path(), prompt or "boxed", sample, repeat))


@pytest.mark.parametrize(
    ("page", "heading", "recipe", "experiment"),
    [
        ("docs/cluster.md", "## One node of 8 GPUs", "pilot_commit", "qwen3_4b"),
        ("docs/cluster.md", "## 2. Data and model, where there is a network", "pilot_commit", "qwen3_8b"),
        ("docs/reproduce.md", "## 2. Data and model", "pilot_commit", "qwen3_8b"),
        ("recipe/hora/README.md", "# HORA", "hora", "qwen2_5_7b"),
        ("recipe/vip/README.md", "# VIP", "vip", "qwen2_5_math_7b"),
        ("recipe/knapsack/README.md", "## Paper, release, here", "knapsack", "qwen2_5_math_7b"),
    ],
)
def test_the_commands_write_what_the_script_reads(page, heading, recipe, experiment):
    text = (ROOT / page).read_text().partition(f"{heading}\n")[2]
    block = next(block for block in re.findall(r"```bash\n(.*?)```", text, re.S) if "verl-ext data" in block)
    data = OmegaConf.to_container(compose(recipe, f"experiment={experiment}").data, resolve=True)
    wanted = [data["train_files"], *([data["val_files"]] if isinstance(data["val_files"], str) else data["val_files"])]
    assert {Path(file).stem for file in wanted} <= set(written(block))
