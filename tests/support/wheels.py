"""Made-up packages: their metadata, without code."""

from __future__ import annotations

import zipfile
from pathlib import Path


def metadata(name: str, version: str, *requires: str) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), "", ""])


def make_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """A wheel of nothing but metadata in ``folder``."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata(name, version, *requires))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def pretend_installed(site_packages: Path, name: str, version: str, *requires: str) -> None:
    """Metadata as if the package were installed."""
    info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata(name, version, *requires))
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
