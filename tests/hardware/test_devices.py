"""Measured GPUs beside the profiles; a stand-in answers for nvidia-smi."""

from __future__ import annotations

import pytest

from verl_ext.hardware.devices import largest_gpu, mismatch
from verl_ext.hardware.memory import GPU_MEMORY

MIB = 2**20
OWN = "use hardware=verl and set the sizes yourself; hardware_name=own keeps a profile whose sizes you have set"


@pytest.mark.parametrize(
    ("hardware", "mebibytes", "name", "remedy"),
    [
        ("h200", 81920, "NVIDIA A800-SXM4-80GB", "use hardware=a800"),
        ("h200", 81559, "NVIDIA H100 80GB HBM3", "use hardware=h100"),
        ("b200", 143771, "NVIDIA H200", "use hardware=h200"),
        ("a100", 40960, "NVIDIA A100-SXM4-40GB", OWN),
        ("h200", 15360, "Tesla T4", OWN),
        ("h100", 143771, "NVIDIA H200", "use hardware=h200"),  # more than expected
    ],
)
def test_another_gpu_than_the_profiles_is_named_with_the_profile_that_fits(hardware, mebibytes, name, remedy):
    assert mismatch(hardware, mebibytes * MIB, name) == (
        f"hardware_name={hardware} expects GPUs of {GPU_MEMORY[hardware] / 2**30:.1f} GiB, this one ({name}) has "
        f"{mebibytes / 1024:.1f} GiB: {remedy}"
    )


@pytest.mark.parametrize(
    ("hardware", "mebibytes", "name"),
    [
        ("h200", 143771, "NVIDIA H200"),
        ("h100", 81920, "NVIDIA A100-SXM4-80GB"),
        ("a800", 81559, "NVIDIA H100 80GB HBM3"),
        ("h100", 95830, "NVIDIA H100 NVL"),  # more, and no profile has as much
        ("b200", 183359, "NVIDIA B200"),
    ],
)
def test_a_gpu_with_about_the_memory_of_the_profile_is_accepted(hardware, mebibytes, name):
    assert mismatch(hardware, mebibytes * MIB, name) is None


def test_the_largest_gpu_is_that_of_nvidia_smi_or_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert largest_gpu() is None
    tool = tmp_path / "nvidia-smi"
    for answer, found in (
        ("6144, NVIDIA T1000\\n81920, NVIDIA A800-SXM4-80GB\\n", (81920 * MIB, "NVIDIA A800-SXM4-80GB")),
        ("[N/A], NVIDIA GB10\\n", None),
        ("No devices were found\\n", None),
        ("", None),
    ):
        tool.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        tool.chmod(0o755)
        assert largest_gpu() == found
