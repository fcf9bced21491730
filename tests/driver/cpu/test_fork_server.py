"""Forks of one process stand in for new Python processes: same arguments, files, environment, signals and end."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.forks import Driver, with_verl

from verl_ext import launch
from verl_ext.driver.cpu import fork_client, fork_server

FIRST_JOB = {**os.environ, fork_client.JOB: fork_client.FIRST_JOB}


def forked(python: str) -> bool:
    """Whether ``python`` starts forks: the server has imported fractions, and a new interpreter has not."""
    code = "import sys; print('fractions' in sys.modules)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60).stdout == "True\n"


@pytest.fixture(scope="module")
def driver():
    driver = Driver()
    yield driver
    driver.close()


def wait_for(true) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_has_its_arguments_folder_environment_and_files(driver, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, logging, os, sys\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ.get('OWN'),\n"
        "                  os.environ.get('OF_THE_DRIVER'), sys.stdin.read(), 'fractions' in sys.modules,\n"
        "                  len(logging.root.handlers)]))\n"
        "print('said', file=sys.stderr)\n"
        "os.write(int(sys.argv[2]), b'kept open')\n"
        "sys.exit(7)"
    )
    reader, writer = os.pipe()
    result = driver.run(
        *("-u", str(script), "--a", str(writer)),
        input="asked",
        cwd=tmp_path,
        env={"OWN": "1", "PATH": os.environ["PATH"]},
        pass_fds=[writer],
    )
    os.close(writer)
    arguments = [str(script), "--a", str(writer)]
    expected = ["__main__", str(script), arguments, str(tmp_path), str(tmp_path), "1", None, "asked", True, 0]
    assert json.loads(result.stdout) == expected
    assert result.stderr == "said\n" and result.returncode == 7
    assert os.read(reader, 100) == b"kept open"
    os.close(reader)


def test_a_module_has_its_arguments_and_folder(driver, tmp_path):
    (tmp_path / "own.py").write_text(
        "import sys; print([__name__, *sys.argv, sys.path[0], 'fractions' in sys.modules])"
    )
    result = driver.run("-u", "-m", "own", "-c", "--a", cwd=tmp_path)
    file = str(tmp_path / "own.py")
    assert result.stdout == f"{['__main__', file, '-c', '--a', str(tmp_path), True]}\n"


def test_code_runs_as_multiprocessing_starts_it(driver):
    code = "import sys, multiprocessing.spawn as s; print(sys.argv, s.get_executable().decode())"
    result = driver.run("-B", "-X", "dev", "-Wignore", "-c", code, "--multiprocessing-fork")
    assert result.stdout == f"['-c', '--multiprocessing-fork'] {driver.python}\n"


def test_multiprocessing_starts_forks(driver, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, sys\n"
        "def child(queue):\n"
        "    queue.put(('fractions' in sys.modules, __name__))\n"
        "    os._exit(5)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    print(queue.get(), process.join(), process.exitcode)\n"
    )
    assert driver.run(str(script)).stdout == "(True, '__mp_main__') None 5\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import atexit, sys; atexit.register(lambda: sys.stderr.write('last'))", 0, "last"),
    ],
)
def test_the_end_of_a_fork_is_the_end_of_its_command(driver, code, status, said):
    result = driver.run("-c", code)
    assert (result.returncode, result.stderr) == (status, said)


def test_an_error_is_printed(driver):
    result = driver.run("-c", "1 / 0")
    assert result.returncode == 1 and result.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_fork(driver, number):
    code = "import signal, sys, time; signal.signal(int(sys.argv[1]), lambda *_: exit(3)); "
    code += "print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([driver.python, "-c", code, str(int(number))], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == 3
    process.stdout.close()


def test_blocked_signals_stay_blocked(driver):
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        assert "SIGINT" in driver.run("-c", code).stdout
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "SIGINT" not in driver.run("-c", code).stdout


def test_a_killed_command_takes_its_fork_along(driver):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    process = subprocess.Popen([driver.python, "-c", code], stdout=subprocess.PIPE, text=True)
    fork = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not fork.is_running())
    assert forked(driver.python)


@pytest.mark.parametrize("sent", [b"", b"abc", struct.pack(fork_client.NUMBER, 100) + b"{"])
def test_a_client_that_ends_within_its_request_does_not_end_the_server(driver, sent):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(Path(driver.python).parent / fork_server.ADDRESS))
        client.sendall(sent)
    assert driver.run("-c", "print(42)").stdout == "42\n"


def test_forks_share_neither_process_group_nor_random_numbers(driver):
    """Ray kills the process group of a worker that has ended."""
    code = "import numpy, os, random; print(os.getpgrp() == os.getpid(), numpy.random.random(), random.random())"
    one, other = (driver.run("-c", code).stdout.split() for _ in range(2))
    assert one[0] == other[0] == "True"
    assert one[1] != other[1] and one[2] != other[2]


def test_forks_have_titles(driver):
    code = "import setproctitle; setproctitle.setproctitle('mine'); print(open('/proc/self/cmdline').read()[:5])"
    assert driver.run("-c", code, env={**os.environ, "OF_THE_FORK": "1"}).stdout == "mine\0\n"


@pytest.mark.parametrize("most", [900, 3000])  # below fork_server.HIGH and above
def test_a_fork_may_open_as_many_files_as_its_client(most, driver):
    """Ray raises the limit for its workers, after the servers were forked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
        small = Driver()
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        assert [each.run("-c", code).stdout for each in (driver, small)] == [f"{most} {hard}\n"] * 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    small.close()


def test_workers_of_another_job_start_as_ever(driver):
    code = "import sys; print('fractions' in sys.modules)"
    assert driver.run("-c", code, env=FIRST_JOB).stdout == "True\n"
    assert driver.run("-c", code, env={**FIRST_JOB, fork_client.JOB: "02000000"}).stdout == "False\n"


def test_the_server_and_its_forks_end_with_the_driver(monkeypatch):
    driver = Driver()
    folder = Path(driver.python).parent
    sleeper = subprocess.Popen([driver.python, "-c", "import time; print(1, flush=True); time.sleep(2)"], stdout=-1)
    sleeper.stdout.readline()
    driver.process.kill()
    driver.close()
    assert sleeper.wait(timeout=60) == 0, "the fork may end itself"
    sleeper.stdout.close()
    wait_for(lambda: not folder.exists())


def test_forks_that_are_rays_own_programs_end_before_workers_after_a_killed_driver():
    driver = Driver("serve as Ray")
    of_workers = driver.process.stdout.readline().strip()
    sleep = "-c", "import time; print(1, flush=True); time.sleep(20)"
    of_ray, worker = (subprocess.Popen([python, *sleep], stdout=-1) for python in (driver.python, of_workers))
    for sleeper in (of_ray, worker):
        sleeper.stdout.readline()
    driver.process.kill()
    driver.close()
    assert of_ray.wait(timeout=60) == 1, "the fork is killed before it ends itself"
    assert worker.poll() is None, "workers get more time"
    worker.kill()
    worker.wait()
    for sleeper in (of_ray, worker):
        sleeper.stdout.close()


def test_without_a_server_python_starts_as_ever():
    driver = Driver()
    command = Path(driver.python).read_text().splitlines()[1].replace('"$@"', "-c 'print(1)'").removeprefix("exec ")
    driver.close()
    wait_for(lambda: not Path(driver.python).exists())
    assert subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60).stdout == "1\n"


def test_a_driver_that_is_not_served_leaves_nothing():
    """A refused configuration, or a run that joins another cluster."""
    driver = Driver("refuse")
    process = psutil.Process(driver.process.pid)
    wait_for(lambda: len(process.children()) == 2)
    servers = process.children()
    driver.close()
    wait_for(lambda: not any(server.is_running() for server in servers))


def test_a_process_without_a_server_has_no_command():
    fork_server.stop()
    assert fork_server.command() is None


def test_ray_starts_its_own_programs_as_forks_of_another_server():
    """The other server has imported what the driver has imported, but not the modules of the workers."""
    driver = Driver("serve as Ray")
    code = "import sys; print('verl_ext.driver.cpu.fork_server' in sys.modules, 'fractions' in sys.modules)"
    assert driver.run("-c", code).stdout == "True False\n"
    driver.close()


def test_the_executable_is_the_drivers_own_before_and_after_starting_ray(monkeypatch):
    before = sys.executable
    with fork_server.starting_ray():
        assert sys.executable == before
    ends = [socket.socketpair() for _ in range(2)]
    servers = [fork_server._Started(Path(f"/{number}"), ours) for number, (ours, _) in enumerate(ends)]
    monkeypatch.setattr(fork_server, "_started", tuple(servers))
    with pytest.raises(KeyError), fork_server.starting_ray():
        assert sys.executable == "/0" and ends[0][1].recv(1) == fork_server.GO
        raise KeyError
    assert sys.executable == before
    fork_server.stop()
    assert [theirs.recv(1) for _, theirs in ends] == [b"", b""]  # both servers see the end
    for _, theirs in ends:
        theirs.close()


def test_there_is_no_server_where_temporary_files_cannot_be_programs(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path / "t"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    (tmp_path / "t").mkdir()
    fork_server.start([], [])
    assert fork_server.command() is None and not (tmp_path / "t").exists()


def test_a_process_that_has_imported_ray_prepares_no_forks(monkeypatch):
    """Ray's C++ part has read the variables of a worker by then."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "ray", object())
    launch.prepare_forks()
    assert not os.environ


def test_a_driver_prepares_its_forks():
    code = "import json, os; from verl_ext import launch; launch.prepare_forks(); "
    code += "print(json.dumps([os.getpid(), *map(os.environ.get, launch.FORKS)]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    pid, job, raylet = json.loads(result.stdout)
    assert (job, raylet) == (fork_client.FIRST_JOB, str(pid)) and launch.FORKS == ("RAY_JOB_ID", "RAY_RAYLET_PID")


@pytest.mark.ray
def test_forks_share_no_random_numbers_of_ray():
    """Ray's C++ part identifies calls of actors by random numbers."""
    forks = with_verl()
    code = """if True:
        import sys, threading
        from ray import UniqueID
        assert "verl.workers.rollout.vllm_rollout.vllm_async_server" in sys.modules, "not a fork"
        print(UniqueID.from_random().hex())
        thread = threading.Thread(target=lambda: print(UniqueID.from_random().hex()))
        thread.start()
        thread.join()
    """
    numbers = [number for _ in range(2) for number in forks.run("-c", code).stdout.split()]
    assert len(numbers) == len(set(numbers)) == 4


@pytest.mark.ray
def test_vllm_looks_at_models_in_a_fork():
    code = """if True:
        import sys
        from vllm.model_executor.models.registry import _run_in_subprocess
        print(_run_in_subprocess(lambda: "verl" in sys.modules), sys.executable)
    """
    result = with_verl().run("-c", code)
    assert result.stdout == f"True {sys.executable}\n", result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-u", "a.py", "-c", "x"], ("", "a.py", ["-c", "x"])),
        (["-B", "-Wignore", "-W", "error", "-c", "x", "-c"], ("-c", "x", ["-c"])),
        (["-E", "a.py"], None),
        (["-B", "-m", "module", "-c"], ("-m", "module", ["-c"])),
        (["-m"], None),
        (["-c"], None),
        (["-u"], None),
        ([], None),
    ],
)
def test_command_lines_that_a_fork_can_serve(arguments, expected):
    assert fork_client.parsed(arguments) == expected


def test_multiprocessings_command_line_is_one_of_them():
    _, *arguments = multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2)
    assert fork_client.parsed([os.fsdecode(argument) for argument in arguments])[0] == "-c"
