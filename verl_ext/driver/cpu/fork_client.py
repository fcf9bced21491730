"""Starts Python as a fork of :mod:`.fork_server`, and lives as long as the fork.

A program of its own, for ``python -I -S``: it imports the smallest part of the standard library, and starts in 20 ms.
``fork_client.py <python> <socket of the server> <job of Ray> <arguments of Python>``
"""

import json
import os
import resource
import select
import signal
import socket
import struct
import sys

NUMBER = "!q"  # struct format of a request's size, of a process id and of an exit status
MOST_FILES = 250  # below Linux's limit of 253 open files in a message on a socket
JOB, FIRST_JOB = "RAY_JOB_ID", "01000000"  # Ray's variable in workers, its value in a first job
FLAGS = ("-u", "-B", "-W", "-X")  # options of Python that a fork may leave out
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # passed on to the fork; SIGUSR1 asks a run to stop


def parsed(arguments: list[str]) -> tuple[str, str, list[str]] | None:
    """Kind, target and arguments of a command line of Python; None if a fork cannot serve it.

    The kind is "-c", and the target the code; or "-m", and the target a module; or "", and the target a script.
    """
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        argument = arguments[position]
        if argument in ("-c", "-m"):
            target, rest = arguments[position + 1 : position + 2], arguments[position + 2 :]
            return (argument, target[0], rest) if target else None
        if not argument.startswith(FLAGS):
            return None
        position += 2 if argument in ("-W", "-X") else 1
    return ("", arguments[position], arguments[position + 1 :]) if position < len(arguments) else None


def request(arguments: list[str], files: list[int], blocked: set[int]) -> bytes:
    """What the fork takes over from this process, besides the open files themselves."""
    content = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "most_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "blocked": [int(number) for number in blocked],
    }
    return json.dumps(content).encode()


def open_files() -> list[int]:
    """Descriptors that a program started by this process would have."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
    return sorted(found)


def main() -> None:
    """Ask the server for a fork, pass on signals, and end as the fork ends."""
    python, address, job, *arguments = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    files = open_files()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal waits until there is a fork to pass it to
    try:
        if parsed(arguments) is None or len(files) > MOST_FILES or os.environ.get(JOB, job) != job:
            raise ConnectionError
        server.connect(address)
        content = request(arguments, files, blocked)
        socket.send_fds(server, [struct.pack(NUMBER, len(content))], files)
        server.sendall(content)
        pid = receive(server)
    except OSError:  # no server, or no fork can serve this command: start Python itself
        server.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.execv(python, [python, *arguments])
    try:
        pass_on_signals(pid, server, blocked)
        status = receive(server)
    except OSError:  # the server was killed
        status = 1
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def pass_on_signals(pid: int, server: socket.socket, blocked: set[int]) -> None:
    """Pass on ``SIGNALS`` to the fork, from now until the server has a number for :func:`receive`.

    A handler that calls ``os.kill`` could come late: Python runs it between two statements, and a signal just before a
    call to the system does not interrupt this call. Hence this function waits for signals and the server at once.
    """
    numbers, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    while server not in (readable := select.select([numbers, server], [], [])[0]) or numbers in readable:
        for number in os.read(numbers, 100):
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # the fork has ended, and the server will say how
                continue


def receive(server: socket.socket) -> int:
    """The server's next number. The first number is the fork's process id, and the second says how the fork has ended.

    The second number is the exit status; if a signal ended the fork, it is the negative number of this signal.
    """
    content = server.recv(struct.calcsize(NUMBER), socket.MSG_WAITALL)
    if len(content) < struct.calcsize(NUMBER):
        raise ConnectionError
    return struct.unpack(NUMBER, content)[0]


if __name__ == "__main__":
    main()
