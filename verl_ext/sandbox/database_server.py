"""A server that executes a model's SQL. The server forks one process for each database.

:mod:`verl_ext.sandbox.databases` starts this file as a script (``python -I -S``). The file imports the standard library
only, so the server is small and a fork costs about a millisecond.

A process serves one database, reads requests from a socket, and ends with the socket's other end. The kernel bounds
the time of each statement (a signal ends the process) and the process's memory, and lets the process open no files. If
a statement kills the process, a copy from before the statement goes on with the unchanged database (:class:`Copy`).

A message is one byte (its kind), the length of its text (4 bytes), and the text in UTF-8. The first request to a
process holds the database's script and limits, each later request one statement.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

HEADER = struct.Struct(">cI")
HELLO, REQUEST, OK, REFUSED = b"h", b"r", b"=", b"!"
STOPPED = "error: the statement took too long or crashed, and changed nothing"
SCRIPT_SECONDS = 60  # of processor time, for the script of a database
LIFETIME_SECONDS = 3600  # of processor time, for all statements of a process
LOOK_SECONDS = 0.01  # between two looks of a copy at its original

STEPS_PER_CHECK = 1000
PAGE_BYTES = 4096
LIKE_PATTERN_BYTES = 64  # matching takes time exponential in the number of wildcards
STATEMENT_BYTES = 100_000
# A cheap statement is short, compiles with few callbacks, and calls cheap functions only: max_steps bounds its time.
CHEAP_CHARACTERS, CHEAP_CALLBACKS = 500, 100
CHEAP_BYTES = 1 << 30  # that all steps of a cheap statement may handle, if each handles a longest value
CHEAP_FUNCTIONS = set(
    "abs avg changes coalesce count iif ifnull last_insert_rowid length lower max min nullif random round "
    "sign substr sum total total_changes typeof upper".split()
)
# Every other function is refused: fts3_tokenizer calls any address, load_extension runs any code, format and printf
# write one wide field for seconds, and the functions of virtual tables trust tables that a statement can change.
FUNCTIONS = CHEAP_FUNCTIONS | set(
    "-> ->> acos acosh asin asinh atan atan2 atanh bm25 ceil ceiling char concat concat_ws cos cosh cume_dist "
    "current_date current_time current_timestamp date datetime degrees dense_rank exp first_value floor glob "
    "group_concat hex highlight if instr json json_array json_array_insert json_array_length json_each "
    "json_error_position json_extract json_group_array json_group_object json_insert json_object json_patch "
    "json_pretty json_quote json_remove json_replace json_set json_tree json_type json_valid jsonb jsonb_array "
    "jsonb_array_insert jsonb_extract jsonb_group_array jsonb_group_object jsonb_insert jsonb_object jsonb_patch "
    "jsonb_remove jsonb_replace jsonb_set julianday lag last_value lead like likelihood likely ln log log10 log2 "
    "ltrim match median mod nth_value ntile octet_length percent_rank percentile percentile_cont percentile_disc pi "
    "pow power quote radians randomblob rank replace row_number rtrim sin sinh snippet soundex "
    "sqlite_compileoption_get sqlite_compileoption_used sqlite_source_id sqlite_version sqrt strftime string_agg "
    "substring subtype tan tanh time timediff trim trunc unhex unicode unistr unistr_quote unixepoch unlikely "
    "zeroblob".split()
)
OF_ALTER_TABLE = ("sqlite_rename_", "sqlite_drop_column", "sqlite_fail")  # SQLite itself calls these functions
FORBIDDEN = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_CREATE_VTABLE,
    sqlite3.SQLITE_DROP_VTABLE,
}


class Session:
    """One database in memory, and the observations of statements.

    Args:
        script: SQL that makes the database. Only the process's limits bound the script.
        limits: ``LIMITS`` of :mod:`verl_ext.sandbox.databases`.
        protect: called before a statement that may be expensive. True: this process is a copy, and the statement has
            killed the original. Without this function, nothing protects the process from a statement: for trusted
            statements only.

    Raises:
        ValueError: the script fails.
    """

    def __init__(self, script: str, limits: Mapping[str, int], protect: Callable[[], bool] = lambda: False):
        self._limits, self._protect = limits, protect
        self._calls = 0  # of the authorizer, for the present statement
        database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._database = database
        database.text_factory = lambda raw: raw.decode(errors="replace")
        # With long values or many steps, cheap functions take seconds as well.
        self._expensive = limits["max_steps"] * limits["max_value_bytes"] > CHEAP_BYTES
        self._expensive = self._expensive or not hasattr(database, "setlimit")
        database.set_authorizer(self._authorize_script)
        try:
            database.executescript(script)
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            raise ValueError(f"create_kwargs.script={script[:500]!r} is not valid SQL: {_message(error)}.") from error
        database.execute("PRAGMA temp_store=MEMORY")
        pages = max(1, limits["max_database_bytes"] // PAGE_BYTES)
        for schema in ("main", "temp"):
            database.execute(f"PRAGMA {schema}.max_page_count={pages}")
        if hasattr(database, "setlimit"):
            database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, LIKE_PATTERN_BYTES)
            database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, STATEMENT_BYTES)
            database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            # A limit on steps bounds neither the time nor the memory of one step.
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits["max_value_bytes"])
        database.set_authorizer(self._authorize)

    def observe(self, statement: str) -> str:
        """Execute the statement.

        Returns:
            The rows, or SQLite's error message.
        """
        self._calls = 0
        # A table, trigger or view may call an expensive function in later statements, so these are expensive, too.
        self._expensive = self._expensive or len(statement) > CHEAP_CHARACTERS
        lines = [] if self._expensive else self._lines(statement)
        if self._expensive:  # perhaps found only now by the authorizer, which refused the statement
            lines = [STOPPED] if self._protect() else self._lines(statement)
        text = "\n".join(lines)
        return text if len(text) <= self._limits["max_characters"] else text[: self._limits["max_characters"]] + "..."

    def close(self) -> None:
        """Free the database's memory. The session and its connection refer to each other."""
        self._database.close()

    def _lines(self, statement: str) -> list[str]:
        checks = iter(range(self._limits["max_steps"] // STEPS_PER_CHECK))
        self._database.set_progress_handler(lambda: next(checks, None) is None, STEPS_PER_CHECK)
        lines: list[str] = []
        room = self._limits["max_characters"]
        try:
            cursor = self._database.execute(statement)
            for row in cursor:  # read all rows, or SQLite may lose the changes of a statement with RETURNING
                if room >= 0:
                    lines.append("|".join(map(_render, row)))
                    room -= len(lines[-1]) + 1
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            return [f"error: {_message(error)}"]
        return lines or ["ok" if cursor.description is None else "no rows"]

    # SQLite calls an authorizer while it compiles a statement, before the statement changes anything.

    def _authorize(self, action: int, argument: str | None, function: str | None, *_: str | None) -> int:
        if action in FORBIDDEN:
            return sqlite3.SQLITE_DENY
        name = (function or "").lower() if action == sqlite3.SQLITE_FUNCTION else None
        if name is not None and name not in FUNCTIONS and not name.startswith(OF_ALTER_TABLE):
            return sqlite3.SQLITE_DENY
        self._calls += 1
        cheap = self._calls <= CHEAP_CALLBACKS and (name is None or name in CHEAP_FUNCTIONS)
        if cheap or self._expensive:
            return sqlite3.SQLITE_OK
        self._expensive = True  # the statement is compiled again, with a copy to protect the database
        return sqlite3.SQLITE_DENY

    def _authorize_script(self, action: int, argument: str | None, function: str | None, *_: str | None) -> int:
        if action != sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_OK
        if function not in CHEAP_FUNCTIONS:
            self._expensive = True
        return sqlite3.SQLITE_DENY if function == "fts3_tokenizer" else sqlite3.SQLITE_OK


class Copy:
    """A copy of this process that waits for the end of a statement.

    If the statement kills this process (the original), the copy takes over: the copy has the same socket, and the
    database as it was before the statement, with its temporary tables and its open transaction.
    """

    def __init__(self) -> None:
        self._process = 0

    def make(self) -> bool:
        """Fork the copy, unless there is a copy.

        Returns:
            False in the original, at once. True in the copy, once the original is dead.
        """
        if self._process:
            return False
        original = os.getpid()
        try:
            self._process = os.fork()
        except OSError:  # too many processes: the statement runs without a copy
            return False
        if self._process:
            return False
        while os.getppid() == original:
            time.sleep(LOOK_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, patience(0))  # a copy has no deadlines yet
        return True

    def end(self) -> None:
        """End the copy, if there is one."""
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            self._process = 0


def patience(cpu_seconds: float) -> float:
    """Wall-clock seconds for work that may take ``cpu_seconds`` of processor time, on a busy machine."""
    return 60 + 10 * cpu_seconds


@contextmanager
def deadline(cpu_seconds: float) -> Iterator[None]:
    """After ``cpu_seconds`` of processor time, or after its :func:`patience`, the kernel ends this process."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, patience(cpu_seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def pack(kind: bytes, text: str) -> bytes:
    """One message."""
    body = text.encode(errors="surrogatepass")
    return HEADER.pack(kind, len(body)) + body


def main() -> None:
    """Fork a process for each socket that arrives at standard input, until standard input ends."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes processes that have ended
    control = socket.socket(fileno=0)
    gc.freeze()
    while True:
        byte, files, _, _ = socket.recv_fds(control, 1, 1)
        if not byte:
            return
        if not files:  # too many open files: the socket ends without a greeting
            continue
        with socket.socket(fileno=files[0]) as connection:
            try:
                process = os.fork()
            except OSError:  # too many processes: the socket ends without a greeting
                continue
            if not process:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _serve(connection)
                os._exit(0)


def _serve(connection: socket.socket) -> None:
    connection.sendall(pack(HELLO, ""))
    request = _receive(connection)
    if request is None:
        return
    arguments = json.loads(request)
    limits, copy = arguments["limits"], Copy()
    _limit_this_process(limits["max_memory_bytes"])
    try:
        with deadline(SCRIPT_SECONDS):
            session = Session(arguments["script"], limits, copy.make)
    except ValueError as error:
        connection.sendall(pack(REFUSED, str(error)[:1000]))
        return
    connection.sendall(pack(OK, ""))
    while (request := _receive(connection)) is not None:
        with deadline(limits["max_cpu_seconds"]):
            answer = session.observe(request)
        copy.end()
        connection.sendall(pack(OK, answer))


def _receive(connection: socket.socket) -> str | None:
    """The text of the next request; None once the other end is closed."""
    header = connection.recv(HEADER.size, socket.MSG_WAITALL)
    if len(header) < HEADER.size:
        return None
    _, length = HEADER.unpack(header)
    body = bytearray()
    while len(body) < length:
        part = connection.recv(min(length - len(body), 1 << 20))
        if not part:
            return None
        body += part
    return body.decode(errors="surrogatepass")


def _limit_this_process(memory: int) -> None:
    """At most ``memory`` bytes more than now, no new files or sockets, no core dump."""
    sqlite3.connect(":memory:").execute("SELECT random()")  # SQLite reads its seed from a file
    with open("/proc/self/statm", "rb") as sizes:
        size = int(sizes.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, size + memory),
        (resource.RLIMIT_CPU, LIFETIME_SECONDS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # open files stay open
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _message(error: BaseException) -> str:
    return str(error) or "out of memory"


def _render(value: object) -> str:
    if value is None:
        return "NULL"
    return f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
