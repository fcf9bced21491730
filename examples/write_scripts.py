"""Write examples/run_*.sh from examples/settings.yaml: ``python examples/write_scripts.py``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parent
WRITTEN = "# Written by examples/write_scripts.py from settings.yaml: change that."
KEYS = {"path", "size", "name", "environment", "variables", "extra", "words"}


def scripts(table: Path = EXAMPLES / "settings.yaml") -> dict[str, str]:
    """Every script by its name.

    Raises:
        ValueError: a model has a key that means nothing, or lacks one, or two scripts have one name.
    """
    written: dict[str, str] = {}
    for family in yaml.safe_load(table.read_text()):
        for model, entry in family["models"].items():
            unknown, missing = sorted(set(entry) - KEYS), sorted({"path", "size", "words"} - set(entry))
            if unknown or missing:
                raise ValueError(f"{table.name}: {model} has unknown keys {unknown} and lacks {missing}.")
            for method, script in family["scripts"].items():
                name = f"run_{method}_{model}.sh"
                if name in written:
                    raise ValueError(f"{table.name}: there are two {name}.")
                written[name] = _script(name, family["settings"], script, model, entry)
    return written


def _script(name: str, settings: str, script: Mapping[str, str], model: str, entry: Mapping[str, Any]) -> str:
    about = script["about"].format(**entry["words"])
    usage = f"Arguments are passed on and win: `bash examples/{name} --cfg job` shows the whole configuration."
    lines = ["#!/usr/bin/env bash"]
    for sentence in (about, usage):
        lines += textwrap.wrap(sentence, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    lines += [WRITTEN, "set -euo pipefail", f"MODEL_NAME={entry.get('name', model)}", f"MODEL_SIZE={entry['size']}"]
    for variable, default in {"MODEL_PATH": entry["path"], **entry.get("environment", {})}.items():
        lines.append(f"{variable}=${{{variable}:-{default}}}")
    lines += [f"{variable}={value}" for variable, value in entry.get("variables", {}).items()]
    lines.append(f'source "$(dirname "${{BASH_SOURCE[0]}}")/{settings}"')
    if "extra" in entry:
        lines += ["SETTINGS+=(", textwrap.indent(entry["extra"].rstrip("\n"), "  "), ")"]
    return "\n".join([*lines, "", f'{script["call"]} "$@"']) + "\n"


if __name__ == "__main__":
    for path in EXAMPLES.glob("run_*.sh"):
        if WRITTEN in path.read_text():
            path.unlink()
    for name, text in scripts().items():
        path = EXAMPLES / name
        path.write_text(text)
        path.chmod(0o755)
