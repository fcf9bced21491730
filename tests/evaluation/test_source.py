"""Where responses come from."""

from __future__ import annotations

import re

from verl_ext.evaluation import source


def test_a_checkpoint_is_told_from_others_but_not_by_its_port(tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    chosen = source.choose(None, None, tmp_path / "model", " --max-model-len  128 ", 60.0)
    (digest,) = re.findall(r"\((\w{16})\)", chosen.settings["checkpoint"])
    assert chosen.settings == {
        "checkpoint": f"{tmp_path / 'model'} ({digest})",
        "server-args": "--max-model-len 128",
    }
    assert chosen.model == f"model-{digest}"
