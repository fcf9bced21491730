"""examples/slurm/train.sbatch on a real Slurm with two nodes; tests/stack/test_slurm.py pre-empts a training."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.forks import with_verl
from support.slurm import ENDED, Slurm, missing

from verl_ext.errors import EXIT_STOPPED

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples/slurm/train.sbatch"
PROGRAM = ROOT / "tests/support/count_nodes.py"


def needs_slurm(test: Callable[..., None]) -> Callable[..., None]:
    """Such a test starts Slurm and Ray, and takes a minute or two."""
    skip = pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: {', '.join(missing())}")
    return pytest.mark.ray(skip(test))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, Slurm(Path(folder)) as cluster:
        yield cluster


def submit(slurm: Slurm, folder: Path, *command: str, options: tuple[str, ...] = (), **environment: str) -> str:
    """Ray's own programs are forks, which saves their imports; the workers of a run are not."""
    environment = {"PYTHON": str(with_verl().as_python(folder / "python")), "PYTHONPATH": str(ROOT)} | environment
    return slurm.submit("--nodes=2", "--gpus-per-node=1", *options, str(SBATCH), *command, cwd=folder, **environment)


def output(folder: Path, job: str) -> str:
    return (folder / f"slurm-{job}.out").read_text(errors="replace")


def ray_processes(job: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if f"/ray_{job}/" in " ".join(p.info["cmdline"] or [])]


def stand_in(folder: Path, name: str, script: str) -> str:
    """A PATH whose program ``name`` is a script that first writes its arguments to ``folder/<name>.log``."""
    (folder / "tools").mkdir(exist_ok=True)
    tool = folder / "tools" / name
    tool.write_text(f'#!/usr/bin/env bash\necho "$*" >>{folder}/{name}.log\n{script}\n')
    tool.chmod(0o755)
    return f"{tool.parent}{os.pathsep}{os.environ['PATH']}"


@needs_slurm
def test_a_run_on_two_nodes_that_fails_leaves_rays_logs_and_one_that_succeeds_does_not(tmp_path):
    """Slurm binds tasks to cores. For the first run, a stand-in for apptainer runs the command without a container."""
    path = stand_in(tmp_path, "apptainer", 'while [[ $1 != *.sif ]]; do shift; done; exec "${@:2}"')
    container = {"PATH": path, "CONTAINER": "/images/verl-ext.sif", "MOUNTS": "/data:/data"}
    cores = len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="slurm_") as folder,
        Slurm(Path(folder), cpus=cores, affinity=True) as bound,
    ):
        program = f"{sys.executable} {PROGRAM} ticks 3 && exit 5"
        job = submit(bound, tmp_path, "bash", "-c", program, **container)
        bound.wait(lambda: bound.job(job)["JobState"] in ENDED, "end of the job", 300)
        log = output(tmp_path, job)
        assert (bound.job(job)["JobState"], bound.job(job)["ExitCode"]) == ("FAILED", "5:0"), log
        right = submit(bound, tmp_path, "true")
        bound.wait(lambda: bound.job(right)["JobState"] in ENDED, "end of the second job", 300)
        state = bound.job(right)
        assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "0")
        for ended in (job, right):
            assert not ray_processes(ended) and not Path(f"/tmp/ray_{ended}").exists()
    assert "Ray on 2 of 2 nodes: node1 node2" in output(tmp_path, right)
    assert not (tmp_path / f"slurm-{right}-ray").exists()
    assert "Ray on 2 of 2 nodes: node1 node2" in log and "error: the run ended with status 5" in log
    assert (tmp_path / "ticks").read_text().split() == ["0/2", "1/2", "2/2"], log
    assert (tmp_path / f"slurm-{job}-ray/node1/gcs_server.out").is_file()
    assert (tmp_path / f"slurm-{job}-ray/node2/raylet.out").is_file()
    assert "may use" not in (tmp_path / f"slurm-{job}-ray.log").read_text()  # Ray has all cores of its node
    calls = (tmp_path / "apptainer.log").read_text()
    started = f"exec --nv --bind {tmp_path}:{tmp_path},"
    assert calls.count(started) == 6  # checks of Ray, of ports and of nodes, Ray itself on two nodes, and the run
    assert ",/tmp:/tmp,/data:/data --pwd " in calls and "ray.scripts.scripts start" in calls


@needs_slurm
def test_a_run_is_asked_to_stop_as_early_as_its_own_steps_need(slurm, tmp_path):
    """A stand-in for srun with pyxis leaves the container away; the signal reaches the run through srun."""
    real = shutil.which("srun", path=slurm.environment["PATH"])
    path = stand_in(
        tmp_path,
        "srun",
        f'for each; do shift; [[ $each == --container-* ]] || set -- "$@" "$each"; done; exec {real} "$@"',
    )
    run = "trap 'exit 75' USR1; echo 190 >$STOP_SECONDS_FILE; touch started; sleep 600 & wait"
    # 300 s, of which 190 * 5 / 4 + 60 are needed; Slurm's signal is too late.
    options = ("--time=5", "--signal=B:USR1@1")
    job = submit(slurm, tmp_path, "bash", "-c", run, options=options, CONTAINER="registry#verl-ext:1", PATH=path)
    slurm.wait((tmp_path / "started").exists, "start of the run", 290)
    slurm.wait(lambda: slurm.job(job)["JobState"] == "PENDING", "requeue", 300)
    log = output(tmp_path, job)
    assert "the run needs 190 s to stop, and the time limit is near" in log
    assert "the run has STOP_TIMEOUT=" in log and "saved; back into the queue" in log
    assert "--container-image=registry#verl-ext:1 --container-mounts=" in (tmp_path / "srun.log").read_text()
    slurm.run("scancel", job)


@needs_slurm
def test_nodes_that_do_not_join_in_time_are_an_error(slurm, tmp_path):
    job = submit(slurm, tmp_path, "true", RAY_TIMEOUT="1")
    slurm.wait(lambda: slurm.job(job)["JobState"] in ENDED, "end of the job", 120)
    assert slurm.job(job)["JobState"] == "FAILED"
    assert "error: not all 2 nodes (node[1-2]) joined Ray within RAY_TIMEOUT=1 s" in output(tmp_path, job)


BUSY_RAY = """
joins = iter([OSError("reset"), [], TimeoutError("busy"), ["node1"], ["node1", "node2"]])
started = False

def init(**_):
    global started
    if not started:
        started = True
        raise AssertionError("no such session")

def is_initialized():
    return started

def nodes():
    if isinstance(answer := next(joins), Exception):
        raise answer
    return [{"NodeName": name, "Alive": True} for name in answer]
"""


def test_no_error_of_a_ray_that_is_starting_ends_the_wait_for_nodes(tmp_path):
    """A module stands in for Ray, whose errors on a busy machine cannot be called up."""
    (tmp_path / "ray.py").write_text(BUSY_RAY)
    (code,) = re.findall(r"nodes_have_joined\(\) \{\n.*? -c '(.*?)'\n", SBATCH.read_text(), re.DOTALL)
    environment = {"PYTHONPATH": str(tmp_path), "SLURM_JOB_NUM_NODES": "2"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "Ray on 1 of 2 nodes: node1\nRay on 2 of 2 nodes: node1 node2\n"
    assert result.stderr == "AssertionError: no such session\nOSError: reset\nTimeoutError: busy\n"


def test_outside_of_a_job_it_says_what_to_do():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    result = subprocess.run(["bash", SBATCH, "x.sh"], env=environment, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2 and "submit this with sbatch" in result.stderr


ALONE = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
    "scancel": "touch cancelled",
    "scontrol": "exit 1",  # requeueing fails, so train.sbatch ends at once
    "python": """case "$*" in
      *token_hex*) echo 127.0.0.1 1 2 0 ;;
      *scripts*) for ((looks = 0; looks < 400; looks++)); do [[ ! -f cancelled ]] || break; sleep 0.05; done ;;
    esac""",  # Ray runs until the script ends it
}
# Once the script sleeps, it waits for the run, and has installed its handler of the signal.
STOP = "while read -r _ _ state _ </proc/$PPID/stat && [[ $state != S ]]; do sleep 0.01; done; kill -USR1 $PPID"


def run_alone(folder: Path, *command: str, tools: dict[str, str] | None = None, **given: str) -> tuple[int, str]:
    """Exit status and output of the sbatch script without Slurm and Ray, for which stand-ins answer."""
    path = [stand_in(folder, name, script) for name, script in (ALONE | (tools or {})).items()][0]
    environment = {"SLURM_JOB_ID": f"test{os.getpid()}", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2"}
    environment |= {"SLURMD_NODENAME": "node1", "SLURM_SUBMIT_DIR": str(folder), "PATH": path, "STOP_TIMEOUT": "15"}
    environment |= given
    with open(folder / "out", "w") as out:  # not a pipe, which a process of the stop holds until STOP_TIMEOUT
        command = ("bash", str(SBATCH), *command)
        result = subprocess.run(command, env=environment, cwd=folder, stdout=out, stderr=out, timeout=60)
    return result.returncode, (folder / "out").read_text()


@pytest.mark.parametrize(
    ("arguments", "requeued"),
    [
        ((), True),
        (("trainer.resume_mode=disable", "trainer.resume_mode=auto"), True),
        (("trainer.resume_mode=disable",), False),
        (("trainer.resume_mode=resume_path", "trainer.resume_from_path=/runs/global_step_4"), False),
    ],
)
def test_a_job_that_would_begin_anew_is_not_put_back_into_the_queue(arguments, requeued, tmp_path):
    run = f"trap 'exit 75' USR1; {STOP}; sleep 20 & wait"
    status, log = run_alone(tmp_path, "bash", "-c", run, "run", *arguments)
    assert status == 1 and " saved" in log
    asked = (tmp_path / "scontrol.log").read_text()
    assert ("requeue test" in asked) == requeued == ("saved; back into the queue" in log), log
    if not requeued:
        sentence = f"not put back into the queue, where {arguments[0]} would begin anew"
        assert f"error: {sentence}: submit again with trainer.resume_mode=auto" in log


def test_a_step_that_does_not_end_in_time_is_given_up_and_the_job_requeued(tmp_path):
    """The run ignores the signal, as a run inside a long call of C code does."""
    deaf = f"trap '' USR1; {STOP}; exec sleep 30"
    status, log = run_alone(tmp_path, "bash", "-c", deaf, STOP_TIMEOUT="0.2")
    assert status == 1 and "STOP_TIMEOUT=0.2 s" in log
    assert "the step did not end within STOP_TIMEOUT; back into the queue" in log
    assert "requeue test" in (tmp_path / "scontrol.log").read_text()


def test_a_task_of_an_array_stops_and_requeues_itself_alone(tmp_path):
    """One task's SLURM_JOB_ID is the number of the whole array, and a command with this number acts on all tasks."""
    run = f"trap 'exit 75' USR1; {STOP}; sleep 20 & wait"
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    run_alone(tmp_path, "bash", "-c", run, **task)
    assert set((tmp_path / "scontrol.log").read_text().splitlines()) == {"show job 7_2", "requeue 7_2"}
    assert (tmp_path / "scancel.log").read_text() == "--signal=TERM 7_2\n"


@pytest.mark.parametrize(("first", "later"), [("60 minutes", "1 minute"), ("1 minute", "60 minutes")])
def test_a_time_limit_that_was_changed_while_the_run_trains_is_the_one_that_counts(first, later, tmp_path):
    """A stand-in for sleep makes the minute between two looks at the limit 0.24 s long.

    The user's SLURM_TIME_FORMAT lets scontrol print a text that is no time for `date`.
    """
    tools = {
        "scontrol": f"[[ -f started ]] && end='{later}' || end='{first}'\n"
        "[[ $SLURM_TIME_FORMAT == standard ]] && format=%FT%T || format='Tomorr %R'\n"
        '[[ $1 == show ]] && echo " EndTime=$(date -d "$end" +"$format")"',
        "sleep": '[[ $1 != 5 ]] || set -- 0.02; exec /usr/bin/sleep "$@"',
    }
    looks = "((enough = $(wc -l <scontrol.log) + 2)); "
    looks += "while [[ -d /proc/$PPID ]] && (($(wc -l <scontrol.log) < enough)); do sleep 0.02; done"
    run = f"trap 'exit 75' USR1; touch started; {looks}; echo 90 >$STOP_SECONDS_FILE; {looks}"
    _, log = run_alone(tmp_path, "bash", "-c", run, tools=tools, STOP_TIMEOUT="", SLURM_TIME_FORMAT="relative")
    assert ("the run needs 90 s to stop, and the time limit is near" in log) == (later == "1 minute"), log
    assert ("saved; back into the queue" in log) == (later == "1 minute")


def test_ray_gets_its_settings_where_the_submission_named_the_variables_to_export(tmp_path):
    """sbatch --export=LIST leaves the list to srun, which then passes on no other variable."""
    srun = 'while [[ $1 == --* ]]; do shift; done\n[[ -z ${SLURM_EXPORT_ENV:-} ]] || exec env -i PATH="$PATH" "$@"\n'
    status, log = run_alone(tmp_path, "true", tools={"srun": srun + 'exec "$@"'}, SLURM_EXPORT_ENV="PATH,PYTHON")
    assert status == 0, log
    started = (tmp_path / "python.log").read_text()
    assert f" --temp-dir=/tmp/ray_test{os.getpid()}/" in started and " --num-cpus=2 --num-gpus=1 " in started
    # All cores of the node: without both options, Slurm may give Ray one of them.
    assert "--overlap --cpus-per-task=2 --cpu-bind=none --nodes=1 " in (tmp_path / "srun.log").read_text()
    assert not (tmp_path / f"slurm-test{os.getpid()}-ray").exists()  # Ray's logs are kept only after a failure


@pytest.mark.parametrize(("threads", "bound"), [(1, False), (64, True)])
def test_cores_that_ray_may_not_use_are_said_at_any_number_of_threads(threads, bound, tmp_path):
    """nproc obeys OMP_NUM_THREADS and OMP_THREAD_LIMIT."""
    cores = 64 if bound else len(os.sched_getaffinity(0))
    task = 'taskset -c "$(taskset -cp $$ | grep -oE "[0-9]+$")"' if bound else ""  # on one core
    given = {name: str(threads) for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")}
    srun = f'while [[ $1 == --* ]]; do shift; done\nexec {task} "$@"'
    run_alone(tmp_path, "true", tools={"srun": srun}, SLURM_CPUS_ON_NODE=str(cores), **given)
    (log,) = tmp_path.glob("slurm-*-ray.log")
    assert (f"Ray on node1 may use 1 of its {cores} cores" in log.read_text()) == bound
    assert ("may use" in log.read_text()) == bound


def test_status_3_of_any_command_keeps_rays_logs(tmp_path):
    status, log = run_alone(tmp_path, "bash", "-c", "exit 3")
    assert status == 0 and "done with status 3: a run of this project ends so when its data is used up" in log, log
    assert f"Ray's logs are in {tmp_path}/slurm-test{os.getpid()}-ray, " in log


@pytest.mark.parametrize(("given", "disk"), [({}, "/tmp"), ({"RAY_TMPDIR": "/local/me"}, "/local/me")])
def test_rays_files_are_on_the_disk_that_was_named_in_a_container_too(given, disk, tmp_path):
    tools = {"apptainer": 'while [[ $1 != *.sif ]]; do shift; done; exec "${@:2}"'}
    status, log = run_alone(tmp_path, "true", tools=tools, CONTAINER="/images/verl-ext.sif", **given)
    assert status == 0, log
    assert f" --temp-dir={disk}/ray_test{os.getpid()}/" in (tmp_path / "python.log").read_text()
    mounts = "/tmp:/tmp" if disk == "/tmp" else f"/tmp:/tmp,{disk}:{disk}"
    assert f",{mounts} --pwd " in (tmp_path / "apptainer.log").read_text()


STOPPED_AT_ONCE = ("bash", "-c", f"{STOP}; sleep 20; true")  # without exec, bash dies of the signal


@pytest.mark.parametrize(
    ("measured", "minutes", "said"),
    [
        ("", 60, "stopped before this start had saved anything; back into the queue"),
        (
            "echo 9 >$STOP_SECONDS_FILE; ",
            60,
            "stopped without saving: let the script start the run with exec; back into",
        ),
        (
            "echo 9 >$STOP_SECONDS_FILE; ",
            2,
            "stopped without saving: let the script start the run with exec; back into",
        ),
        (
            "",
            2,
            "error: no step (of an evaluation: no run of verl) ended within the time limit, and the next start would "
            "end in the same way: submit again with a longer --time (or a smaller --per-run)",
        ),
    ],
)
def test_a_run_that_was_stopped_without_saving_says_why(measured, minutes, said, tmp_path):
    tools = {"scontrol": f"[[ $1 == show ]] && echo \" EndTime=$(date -d '{minutes} minutes' +%FT%T)\""}
    status, log = run_alone(tmp_path, "bash", "-c", measured + STOPPED_AT_ONCE[2], tools=tools)
    assert status == 1 and said in log
    assert ("requeue test" in (tmp_path / "scontrol.log").read_text()) == said.startswith("stopped")


@pytest.mark.parametrize(
    ("nodes", "given", "address"),
    [("1", {}, "127.0.0.1"), ("2", {"HEAD_ADDRESS": "10.0.0.7"}, "10.0.0.7"), ("2", {}, None)],
)
def test_rays_head_has_an_address_that_other_nodes_can_reach(nodes, given, address, tmp_path):
    status, log = run_alone(tmp_path, "true", SLURM_JOB_NUM_NODES=nodes, **given)
    calls = (tmp_path / "python.log").read_text()
    assert (f"--node-ip-address={address} " in calls) == (status == 0) == (address is not None)
    assert ("error: other nodes cannot reach node1 by 127.0.0.1: set HEAD_ADDRESS" in log) == (address is None)


def test_no_start_overwrites_the_metrics_of_another(tmp_path):
    for _ in range(3):
        run_alone(tmp_path, "bash", "-c", 'touch "$VERL_FILE_LOGGER_PATH"', VERL_FILE_LOGGER_PATH=f"{tmp_path}/m.jsonl")
    written = sorted(file.name for file in tmp_path.glob("*.jsonl"))
    assert written == ["m-restart-1.jsonl", "m-restart-2.jsonl", "m.jsonl"]


def test_a_script_that_is_not_there_ends_the_job_before_ray_starts(tmp_path):
    status, log = run_alone(tmp_path, "examples/run_nothing.sh", "trainer.nnodes=2")
    assert status == 1 and f"error: there is no script examples/run_nothing.sh in {tmp_path}" in log
    assert not (tmp_path / "python.log").exists()


def test_the_exit_status_is_the_drivers():
    assert f"STOPPED={EXIT_STOPPED} " in SBATCH.read_text()
