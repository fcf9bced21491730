"""Databases in processes: a model's SQL can end its own process, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_ext.sandbox import databases
from verl_ext.sandbox.database_server import HEADER, OK, STOPPED, Session
from verl_ext.sandbox.databases import GONE, LIMITS, Database, DatabaseFailure

SCRIPT = "CREATE TABLE r(a INTEGER); INSERT INTO r VALUES(5);"
CONTENT = ["SELECT name, sql FROM sqlite_master", "SELECT quote(a) FROM r"]  # quote: 5 and '5' differ
NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n)"
ZEROS = "hex(zeroblob(1950-x%2))"  # with x, or SQLite would compute the value once
# Each call of trim compares 3,900 characters with 331 characters: 30 s for 100,000 steps.
TRIM = f"trim({ZEROS}, replace(hex(zeroblob(165)), '0', '1') || '0')"
SLOW = f"{NUMBERS} SELECT sum(length({TRIM})) FROM n"
CHAIN = ", ".join(f"c{i} AS (SELECT p.x FROM c{i - 1} p, c{i - 1} q)" for i in range(1, 25))
ONE_SECOND = LIMITS | {"max_cpu_seconds": 1}
SOON = {"max_cpu_seconds": 0.25}  # for statements that end at this limit; others of these tests need some 0.001 s


def make(script=SCRIPT, **limits):
    return Database(script, ONE_SECOND | {"max_characters": 1000} | limits)


def execute(database, *statements):
    async def run():
        return [await database.execute(statement) for statement in statements]

    return asyncio.run(run())


def processes(owner=None):
    """Processes of databases, and the server."""
    found = []
    for process in psutil.Process(owner).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("database_server" in part for part in process.cmdline()):
                found.append(process)
    return found


def process_of(database):
    """Start a database, and find its new process."""
    before = {process.pid for process in processes()}
    execute(database, "SELECT 1")
    (process,) = [process for process in processes() if process.pid not in before and process.ppid() in before]
    return process


def wait_until(condition):
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def server():
    """The server is there before the first test counts processes."""
    execute(make(), "SELECT 1")


@pytest.fixture(scope="module")
def attacked():
    """One database for all attacks. No attack may change it."""
    return make()


ATTACKS = [
    ("a call of any address", "SELECT fts3_tokenizer('simple', x'4141414141414141')", "not authorized to use function"),
    ("an address of the process", "SELECT hex(fts3_tokenizer('simple'))", "not authorized to use function"),
    ("capital letters", "SELECT FTS3_TOKENIZER('simple')", "not authorized to use function"),
    ("a tokenizer's table", "CREATE VIRTUAL TABLE t USING fts4(x, tokenize=evil)", "not authorized"),
    ("a table with writable internals", "CREATE VIRTUAL TABLE t USING fts5(x)", "not authorized"),
    ("another module", "CREATE VIRTUAL TABLE t USING rtree(a, b, c)", "not authorized"),
    ("internals of a module", "SELECT rtreenode(2, zeroblob(900))", "not authorized to use function"),
    ("code", "SELECT load_extension('/tmp/x.so')", "not authorized to use function"),
    ("write a file", "SELECT writefile('/tmp/x', 'a')", "no such function"),
    ("read a file", "SELECT readfile('/etc/passwd')", "no such function"),
    ("an editor", "SELECT edit('a', 'vi')", "no such function"),
    ("a database file", "ATTACH '/tmp/x.db' AS x", "not authorized"),
    ("a database file by VACUUM", "VACUUM INTO '/tmp/x.db'", "authoriz"),
    ("settings", "PRAGMA writable_schema=1", "not authorized"),
    ("settings as a table", "SELECT * FROM pragma_database_list", "not authorized"),
    ("the schema", "UPDATE sqlite_master SET sql='x'", "may not be modified"),
    ("a gigabyte", "SELECT zeroblob(1000000000)", "too big"),
    ("a random gigabyte", "SELECT randomblob(1000000000)", "too big"),
    ("a wide field", "SELECT printf('%*d', 2000000000, 1)", "not authorized to use function"),
    ("a wide field by format", "SELECT format('%.*c', 2000000000, 'x')", "not authorized to use function"),
    ("a huge row", f"SELECT {', '.join(['hex(zeroblob(2000))'] * 9)} UNION SELECT 1,2,3,4,5,6,7,8,9", "too big"),
    ("a doubling text", "WITH n(x) AS (SELECT 'a' UNION ALL SELECT x||x FROM n) SELECT x FROM n", "too big"),
    ("a growing group", f"{NUMBERS} SELECT group_concat(x) FROM n", "interrupted"),
    ("a growing array", f"{NUMBERS} SELECT json_group_array(x) FROM n", "interrupted"),
    ("a growing window", f"{NUMBERS} SELECT sum(x) OVER (ORDER BY x) FROM n", "interrupted"),
    ("no end", f"{NUMBERS} SELECT count(*) FROM n", "interrupted"),
    ("rows without end", f"{NUMBERS} INSERT INTO r SELECT x FROM n", "interrupted"),
    ("a large database", f"{NUMBERS} INSERT INTO r SELECT zeroblob(4000) FROM n", "full"),
    ("a series", "SELECT * FROM generate_series(1, 1000000000)", "no such table"),
    ("a long LIKE pattern", f"SELECT 'a' LIKE '{'%a' * 40}'", "pattern too complex"),
    ("a long GLOB pattern", f"SELECT 'a' GLOB '{'*a' * 40}'", "pattern too complex"),
    ("a regular expression", "SELECT 'aaaa' REGEXP '(a+)+b'", "no such function"),
    ("deep brackets", f"SELECT {'(' * 3000}1{')' * 3000}", "parser stack overflow|depth"),
    ("a deep expression", f"SELECT 1{'+1' * 5000}", "maximum depth"),
    ("deep JSON", f"SELECT json('{'[' * 2040}{']' * 2040}')", "malformed JSON|too big"),
    ("many columns", f"SELECT {','.join('1' * 3000)}", "too many columns"),
    ("many SELECTs", f"SELECT 1{' UNION ALL SELECT 1' * 600}", "too many terms"),
    ("a long statement", f"SELECT '{'a' * 200_000}'", "too large|too big"),
    ("a text too long", f"SELECT '{'a' * 5_000}'", "too big"),
    (
        "subqueries that double",
        f"WITH c0 AS (SELECT 1 x), {CHAIN} SELECT * FROM c24",
        "out of memory|too long|references",
    ),
]


@pytest.mark.parametrize(("attack", "statement", "message"), ATTACKS, ids=[row[0] for row in ATTACKS])
def test_an_attack_is_an_error_message_and_changes_nothing(attack, statement, message, attacked):
    error, *after = execute(attacked, statement, *CONTENT)
    assert error.startswith("error: ") and any(part in error for part in message.split("|")), error
    assert after == ["r|CREATE TABLE r(a INTEGER)", "5"]


def test_a_temporary_table_is_bounded_too():
    rows = f"{NUMBERS} INSERT INTO t SELECT zeroblob(4000) FROM n"
    assert "full" in execute(make(), "CREATE TEMP TABLE t(x)", rows)[1]


def test_a_recursive_trigger_ends():
    trigger = "CREATE TRIGGER t AFTER INSERT ON r BEGIN INSERT INTO r SELECT a+1 FROM r; END"
    *_, error, after = execute(make(), trigger, "INSERT INTO r VALUES(1)", "SELECT 1")
    assert after == "1" and (error == "ok" or error.startswith("error: "))


SLOW_STATEMENTS = {
    "trim": SLOW,
    "insert": f"INSERT INTO r {SLOW}",
    "like": f"{NUMBERS} SELECT sum({ZEROS} LIKE '%{'_0' * 30}1') FROM n",
    "glob": f"{NUMBERS} SELECT sum({ZEROS} GLOB '*{'[0-1]' * 10}1') FROM n",
}


@pytest.mark.parametrize("statement", SLOW_STATEMENTS.values(), ids=SLOW_STATEMENTS.keys())
def test_a_slow_statement_is_stopped_and_changes_nothing(statement):
    """Not even the temporary table and the open transaction of earlier statements."""
    before = "CREATE TEMP TABLE t AS SELECT 7 AS x", "BEGIN", "UPDATE r SET a=6"
    *_, error, values, back, old = execute(
        make(**SOON), *before, statement, "SELECT a, (SELECT x FROM t) FROM r", "ROLLBACK", "SELECT a FROM r"
    )
    assert error == STOPPED
    assert (values, back, old) == ("6|7", "ok", "5")


@pytest.mark.parametrize("by_script", [True, False], ids=["in the script", "in a statement"])
def test_a_slow_function_may_hide_in_a_table(by_script):
    """SQLite asks nothing about the functions of a generated column when a later statement computes the column."""
    table = f"CREATE TABLE s(x, y AS ({TRIM}))"
    database = make(f"{SCRIPT} {table}", **SOON) if by_script else make(**SOON)
    if not by_script:
        execute(database, table)
    fill = f"INSERT INTO s SELECT x FROM ({NUMBERS} SELECT x FROM n LIMIT 9000)"
    assert execute(database, fill, "SELECT count(*) FROM s") == [STOPPED, "0"]


def test_a_stopped_statement_is_stopped_again():
    database = make(**SOON)
    assert execute(database, SLOW, SLOW, "UPDATE r SET a=a+1 RETURNING a") == [STOPPED, STOPPED, "6"]


def test_a_long_observation_of_an_end_is_cut():
    assert execute(make(max_characters=24, **SOON), SLOW) == ["error: the statement too..."]


def test_the_event_loop_goes_on():
    async def run():
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        slow, fast = make(), make()
        await fast.execute("SELECT 1")
        heart = asyncio.create_task(beat())
        stopping = asyncio.create_task(slow.execute(SLOW))
        quick = 0
        while not stopping.done():
            assert await fast.execute("SELECT a FROM r") == "5"
            quick += 1
        heart.cancel()
        return await stopping, beats, quick

    observation, beats, quick = asyncio.run(run())
    assert observation == STOPPED
    assert beats >= 10 and quick >= 10  # of about 100 and 1000


def test_memory_is_bounded():
    sort = f"{NUMBERS} SELECT hex(zeroblob(1500-x%2)) FROM n ORDER BY 1"
    assert execute(make(max_memory_bytes=8 << 20), sort, "SELECT 1") == ["error: out of memory", "1"]


def test_a_crash_in_a_statement_changes_nothing():
    """SIGSEGV from outside stands for an error in SQLite."""
    database, other = make(max_cpu_seconds=60), make()
    execute(other, "UPDATE r SET a=8")
    process = process_of(database)
    assert execute(database, "SELECT trim('a')", "UPDATE r SET a=6") == ["a", "ok"]  # from now on, there are copies

    async def run():
        work = asyncio.create_task(database.execute(SLOW))
        while not process.children():
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGSEGV)
        return await work

    assert asyncio.run(run()) == STOPPED
    assert execute(database, "SELECT a FROM r") == ["6"] and execute(other, "SELECT a FROM r") == ["8"]


def test_a_crash_without_a_copy_ends_one_database():
    database, other = make(), make()
    execute(other, "UPDATE r SET a=8")
    process = process_of(database)
    os.kill(process.pid, signal.SIGSEGV)
    assert execute(database, "SELECT a FROM r", "SELECT 1") == [GONE, GONE]
    assert execute(other, "SELECT a FROM r") == ["8"]


def test_a_crash_in_the_script_is_the_data_s_fault():
    database = make(f"{SCRIPT} CREATE TABLE s AS {SLOW}")
    before = {process.pid for process in processes()}

    async def run():
        work = asyncio.create_task(database.execute("SELECT 1"))
        while not (new := [each for each in processes() if each.pid not in before and each.cpu_times().user > 0.3]):
            await asyncio.sleep(0.05)
        new[0].send_signal(signal.SIGSEGV)
        await work

    with pytest.raises(DatabaseFailure, match="create_kwargs.script=.CREATE TABLE r.* took too long or crashed"):
        asyncio.run(run())


def test_the_fault_of_a_long_script_is_named():
    with pytest.raises(DatabaseFailure, match="no such table: nowhere"):
        execute(make(f"{SCRIPT}{'INSERT INTO r VALUES(1);' * 1000}DELETE FROM nowhere"), "SELECT 1")


def test_a_script_calls_no_address():
    with pytest.raises(DatabaseFailure, match="not authorized to use function: fts3_tokenizer"):
        execute(make("SELECT fts3_tokenizer('simple', x'4141414141414141')"), "SELECT 1")


def test_a_process_opens_nothing_and_knows_no_passwords(monkeypatch):
    monkeypatch.setenv("PASSWORD", "secret")
    monkeypatch.setattr(databases, "_SERVERS", [])
    before = {process.pid for process in processes()}
    database = make()
    execute(database, "SELECT 1")
    server, process = sorted((each for each in processes() if each.pid not in before), key=psutil.Process.create_time)
    assert process.ppid() == server.pid
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        assert process.rlimit(limit) == (0, 0)
    assert "PASSWORD" not in process.environ()


def test_a_database_ends_with_its_owner():
    database = make()
    process = process_of(database)
    gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        del database
        gc.collect()
    process.wait(120)
    assert not seen  # such as an unclosed socket


def test_everything_ends_with_a_killed_trainer():
    """Even in the middle of a statement."""
    code = f"""
import asyncio
from verl_ext.sandbox.databases import LIMITS, Database

async def main():
    database = Database({SCRIPT!r}, LIMITS | {{"max_cpu_seconds": 2}})
    await database.execute("SELECT 1")
    print("ready", flush=True)
    await database.execute({SLOW!r})

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "ready\n"
        wait_until(lambda: len(processes(trainer.pid)) == 3)  # the server, the database and its copy
        started = processes(trainer.pid)
        trainer.kill()
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            wait_until(lambda process=process: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_databases_outlive_their_server_and_new_ones_get_another():
    database = make()
    server = process_of(database).parent()
    os.kill(server.pid, signal.SIGKILL)
    server.wait(120)
    assert execute(database, "SELECT a FROM r") == ["5"]
    assert execute(make(), "SELECT a FROM r") == ["5"]


def test_without_a_server_the_rollout_fails(monkeypatch):
    monkeypatch.setattr(databases, "_SERVERS", [])
    monkeypatch.setattr(databases, "START_PAUSE", 0.05)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DatabaseFailure, match="no process for a database could be started in 3 attempts"):
        execute(make(), "SELECT 1")


def test_many_databases_at_once():
    async def run(count):
        all_databases = [make(f"CREATE TABLE r(a); INSERT INTO r VALUES({start})") for start in range(count)]
        for _ in range(3):
            statements = [database.execute("UPDATE r SET a=a*2 RETURNING a") for database in all_databases]
            values = await asyncio.gather(*statements)
        return values

    assert asyncio.run(run(100)) == [str(8 * start) for start in range(100)]


def test_calls_at_once_are_executed_in_order():
    async def run():
        database = make()
        return await asyncio.gather(*(database.execute(f"UPDATE r SET a=a*2+{add} RETURNING a") for add in (0, 1, 0)))

    assert asyncio.run(run()) == ["10", "21", "42"]


def test_each_process_has_its_own_random_numbers():
    databases_ = [make(), make()]
    assert len({execute(database, "SELECT random()")[0] for database in databases_}) == 2


def test_an_answer_after_a_cancellation_is_never_the_next_answer():
    database = make()

    async def run():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(database.execute(SLOW), 0.3)

    execute(database, "SELECT 1")
    asyncio.run(run())
    assert execute(database, "SELECT 2", "SELECT 3") == [GONE, GONE]


@pytest.mark.parametrize(
    "answer",
    [
        HEADER.pack(OK, 1 << 31),
        HEADER.pack(OK, 1004) + b"a" * 1004,
        HEADER.pack(b"?", 1) + b"a",
        HEADER.pack(OK, 5) + b"a",
        b"garbage without a header" * 100,
        b"",
    ],
    ids=["two gigabytes", "too long", "another kind", "too short", "garbage", "nothing"],
)
def test_a_process_that_lies_is_gone(answer):
    """A socket of ours stands for a process that a statement has taken over."""
    database = make()
    execute(database, "SELECT 1")
    database._socket.close()
    database._socket, process = socket.socketpair()
    database._socket.setblocking(False)
    with process:
        process.sendall(answer)
        process.shutdown(socket.SHUT_WR)
        assert execute(database, "SELECT 2", "SELECT 3") == [GONE, GONE]


def test_an_answer_that_is_too_long_is_not_awaited():
    async def run(ours):
        await asyncio.wait_for(databases._ask(ours, b"", 10, 600), 60)

    ours, process = socket.socketpair()
    with ours, process:
        ours.setblocking(False)
        process.sendall(HEADER.pack(OK, 11))
        with pytest.raises(EOFError):
            asyncio.run(run(ours))


def test_an_answer_that_never_comes():
    ours, silent = socket.socketpair()
    with ours, silent:
        ours.setblocking(False)
        with pytest.raises(EOFError):
            asyncio.run(databases._ask(ours, b"", 10, 0.2))


values = st.one_of(
    st.integers(-99, 99), st.sampled_from(["NULL", "'é'", "x'ff'", "1.5", "'a b'", "9223372036854775807"])
)
statements = st.lists(
    st.one_of(
        st.builds("INSERT INTO r VALUES({}) RETURNING a".format, values),
        st.builds("UPDATE r SET a=a{}{} RETURNING a".format, st.sampled_from("+-*/%|"), values),
        st.builds("DELETE FROM r WHERE a>{}".format, values),
        st.builds("SELECT {}(a), count(*) FROM r".format, st.sampled_from(["sum", "max", "group_concat", "hex"])),
        st.builds("SELECT a FROM r WHERE a LIKE '%{}%' ORDER BY a".format, st.integers(0, 9)),
        st.builds("CREATE {} s AS SELECT trim(a) FROM r".format, st.sampled_from(["TABLE", "TEMP TABLE", "VIEW"])),
        st.sampled_from(
            ["BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT p", "ROLLBACK TO p", "DROP TABLE s", "SELECT * FROM s"]
        ),
        st.sampled_from(
            [f"{NUMBERS} INSERT INTO r SELECT x FROM n", "SELEC 1", "", "SELECT 1; SELECT 2", "SELECT '\ud800'"]
        ),
        st.text(max_size=8),
    ),
    max_size=10,
)


@example(["INSERT INTO r VALUES('é'), (x'c3a9'), ('a b'), (1.5), (NULL)"])  # all types of a value, with the script's 5
@given(statements)
@settings(max_examples=40)
def test_a_process_observes_what_a_plain_connection_observes(some):
    database, some = make(), [*some, *CONTENT, "SELECT * FROM s"]
    with contextlib.closing(Session(SCRIPT, ONE_SECOND | {"max_characters": 1000})) as plain:
        assert execute(database, "SELECT a FROM r", *some) == ["5", *map(plain.observe, some)]
