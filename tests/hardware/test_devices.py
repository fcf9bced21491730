"""Measured GPUs beside the profiles; a stand-in answers for nvidia-smi."""

from __future__ import annotations

import pytest

from verl_ext.errors import RunError
from verl_ext.hardware.devices import gpus, mismatch
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


def test_each_gpu_is_as_nvidia_smi_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match=r"^nvidia-smi does not answer: install NVIDIA's driver, or set HARDWARE=cpu$"):
        gpus()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '6144, 580.95.05, NVIDIA T1000\\n[N/A], 580.95.05, NVIDIA GB10, rev A\\n'\n")
    tool.chmod(0o755)
    assert gpus() == [(6144 * MIB, "NVIDIA T1000", "580.95.05"), (0.0, "NVIDIA GB10, rev A", "580.95.05")]
    for answer in ("No devices were found", ""):
        tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
        with pytest.raises(RunError, match=rf"^nvidia-smi finds no GPU \({answer}\): install"):
            gpus()
