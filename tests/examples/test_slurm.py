"""examples/slurm/train.sbatch on a real Slurm with two nodes; tests/stack/test_slurm.py pre-empts a training."""

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
    assert not (tmp_path / f"slurm-{job}-ray").exists()  # Ray's logs are kept only after a failure


@needs_slurm
def test_a_step_that_does_not_end_in_time_is_given_up_and_the_job_requeued(slurm, tmp_path):
    deaf = "import pathlib, signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    deaf += "pathlib.Path('started').touch(); time.sleep(600)"
    job = submit(slurm, tmp_path, sys.executable, "-c", deaf, STOP_TIMEOUT="1")
    slurm.wait((tmp_path / "started").exists, "start of the program", 300)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(lambda: slurm.job(job)["JobState"] == "PENDING", "requeue", 120)
    assert not ray_processes(job) and not Path(f"/tmp/ray_{job}").exists()
    log = output(tmp_path, job)
    assert "STOP_TIMEOUT=1 s" in log and "the step did not end within STOP_TIMEOUT; back into the queue" in log
    slurm.run("scancel", job)


@needs_slurm
def test_a_program_that_fails_fails_the_job_and_leaves_rays_logs(slurm, tmp_path):
    job = submit(slurm, tmp_path, sys.executable, "-c", "raise SystemExit(5)")
    slurm.wait(lambda: slurm.job(job)["JobState"] in ENDED, "end of the job", 300)
    assert (slurm.job(job)["JobState"], slurm.job(job)["ExitCode"]) == ("FAILED", "5:0")
    assert "error: the run ended with status 5" in output(tmp_path, job)
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
