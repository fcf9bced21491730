"""Write what is computed into the hardware profiles and docs/hardware.md: ``python docs/write_hardware.py``."""

from __future__ import annotations

from pathlib import Path

from verl_ext.hardware.memory import GPU_MEMORY
from verl_ext.hardware.profiles import megatron_table, models_table, profiles_table, yaml_table

ROOT = Path(__file__).resolve().parents[1]


def written() -> dict[Path, str]:
    """The files as they should be."""
    files = {}
    for gpu in GPU_MEMORY:
        path = ROOT / "verl_ext" / "config" / "hardware" / f"{gpu}.yaml"
        head, mark, _ = path.read_text().partition("hardware_profile:\n")
        if not mark:
            raise ValueError(f"{path} has no line hardware_profile:")
        files[path] = head + yaml_table(gpu)
    page = ROOT / "docs" / "hardware.md"
    text = page.read_text()
    tables = {"models": models_table(), "profiles": profiles_table(), "megatron": megatron_table()}
    for name, table in tables.items():
        head, begin, rest = text.partition(f"<!-- {name}: python docs/write_hardware.py -->\n")
        _, end, tail = rest.partition(f"<!-- end of {name} -->\n")
        if not begin or not end:
            raise ValueError(f"{page} has no marks for the table {name}.")
        text = head + begin + table + end + tail
    return files | {page: text}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
