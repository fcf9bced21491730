"""examples/slurm/train.sbatch on a real Slurm with two nodes: Ray comes up on both, a stopped job resumes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.slurm import ENDED, Slurm, missing

from verl_ext.driver.stop import EXIT_STOPPED

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples/slurm/train.sbatch"
PROGRAM = ROOT / "tests/support/count_nodes.py"

needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: {', '.join(missing())}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, Slurm(Path(folder)) as cluster:
        yield cluster


def submit(slurm: Slurm, folder: Path, *command: str, options: tuple[str, ...] = (), **environment: str) -> str:
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)} | environment
    return slurm.submit("--nodes=2", "--gpus-per-node=1", *options, str(SBATCH), *command, cwd=folder, **environment)


def output(folder: Path, job: str) -> str:
    return (folder / f"slurm-{job}.out").read_text(errors="replace")


def ray_processes(job: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if f"/ray_{job}/" in " ".join(p.info["cmdline"] or [])]


@needs_slurm
def test_a_program_runs_on_all_nodes_and_ray_is_gone_after_it(slurm, tmp_path):
    job = submit(slurm, tmp_path, sys.executable, str(PROGRAM), "ticks", "3")
    slurm.wait(lambda: slurm.job(job)["JobState"] in ENDED, "end of the job", 300)
    log = output(tmp_path, job)
    assert slurm.job(job)["JobState"] == "COMPLETED", log
    assert (tmp_path / "ticks").read_text().split() == ["0/2", "1/2", "2/2"]
    assert "Ray on 2 of 2 nodes: node1 node2" in log
    assert not ray_processes(job) and not Path(f"/tmp/ray_{job}").exists()
    assert not (tmp_path / f"slurm-{job}-ray").exists()  # Ray's logs are kept of runs that fail


@needs_slurm
def test_a_pre_empted_job_goes_back_into_the_queue_and_on(slurm, tmp_path):
    job = submit(slurm, tmp_path, sys.executable, str(PROGRAM), "ticks", "1000000")
    slurm.wait((tmp_path / "ticks").exists, "first tick", 300)
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=tmp_path)
    slurm.wait(lambda: slurm.job(urgent)["JobState"] == "COMPLETED", "end of the urgent job", 120)
    assert slurm.job(job)["JobState"] == "PENDING", output(tmp_path, job)
    done = len((tmp_path / "ticks").read_text().split())
    assert not ray_processes(job) and not Path(f"/tmp/ray_{job}").exists()
    slurm.start_now(job)
    slurm.wait(lambda: len((tmp_path / "ticks").read_text().split()) > done, "tick after the restart", 300)
    slurm.run("scancel", job)
    slurm.wait(lambda: slurm.job(job)["JobState"] == "CANCELLED", "end of the job", 120)
    ticks = [int(tick.split("/")[0]) for tick in (tmp_path / "ticks").read_text().split()]
    assert ticks == list(range(len(ticks)))
    log = output(tmp_path, job)
    assert "start 1] saved; back into the queue" in log and "start 2] starting" in log
    slurm.wait(lambda: not ray_processes(job), "end of Ray", 60)


@needs_slurm
def test_a_program_that_fails_fails_the_job_and_leaves_rays_logs(slurm, tmp_path):
    job = submit(slurm, tmp_path, sys.executable, "-c", "raise SystemExit(3)")
    slurm.wait(lambda: slurm.job(job)["JobState"] in ENDED, "end of the job", 300)
    assert (slurm.job(job)["JobState"], slurm.job(job)["ExitCode"]) == ("FAILED", "3:0")
    assert "error: the run ended with status 3" in output(tmp_path, job)
    assert (tmp_path / f"slurm-{job}-ray/node1/gcs_server.out").is_file()
    assert (tmp_path / f"slurm-{job}-ray/node2/raylet.out").is_file()


@needs_slurm
def test_nodes_that_do_not_join_in_time_are_an_error(slurm, tmp_path):
    job = submit(slurm, tmp_path, "true", RAY_TIMEOUT="1")
    slurm.wait(lambda: slurm.job(job)["JobState"] in ENDED, "end of the job", 120)
    assert slurm.job(job)["JobState"] == "FAILED"
    assert "error: not all 2 nodes (node[1-2]) joined Ray within RAY_TIMEOUT=1 s" in output(tmp_path, job)


def test_outside_of_a_job_it_says_what_to_do():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    result = subprocess.run(["bash", SBATCH, "x.sh"], env=environment, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2 and "submit this with sbatch" in result.stderr


def test_the_exit_status_is_the_drivers():
    assert f"STOPPED={EXIT_STOPPED} " in SBATCH.read_text()
