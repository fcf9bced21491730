"""The SQLite tool, called as in verl's tool_agent loop."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agent_loops import ScriptedEngine, make_loop, make_tokenizer, sql_call
from support.shells import Agent
from verl.tools.tool_registry import initialize_tools_from_config

from verl_ext.driver.prefixes import PrefixClient
from verl_ext.driver.tools.sqlite import NOT_TEXT, SqliteTool
from verl_ext.sandbox.databases import DatabaseFailure

SCRIPT = "CREATE TABLE r(a INTEGER); INSERT INTO r VALUES(5);"
# Together, the content of a database with the tables r and s. quote: 5 and '5' differ.
CONTENT = ["SELECT name, sql FROM sqlite_master", "SELECT quote(a) FROM r", "SELECT quote(a) FROM s"]
NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n)"


class Trajectory:
    """A stand-in for verl's AgentData: the tool needs only its type and the time of its end."""


@pytest.fixture(scope="module")
def tool():
    return SqliteTool({"type": "native"})


async def call(tool, trajectory, query, script=SCRIPT):
    """Create, execute and release around every call, as in ToolAgentLoop."""
    instance, _ = await tool.create(create_kwargs={"script": script})
    try:
        response, reward, metrics = await tool.execute(instance, {"query": query}, agent_data=trajectory)
    finally:
        await tool.release(instance)
    assert (reward, metrics) == (0.0, {})
    return response.text


def session(tool, *queries, script=SCRIPT):
    """The observations of one trajectory, and the observations of CONTENT at its end."""
    trajectory = Trajectory()

    async def run():
        return [await call(tool, trajectory, query, script) for query in [*queries, *CONTENT]]

    observations = asyncio.run(run())
    return observations[: len(queries)], observations[len(queries) :]


def test_state_lasts_from_call_to_call(tool):
    observations, content = session(
        tool, "UPDATE r SET a=a+4 RETURNING a", "UPDATE r SET a=a*2", "SELECT a FROM r", "CREATE TABLE s(t)"
    )
    assert observations == ["9", "ok", "18", "ok"]
    assert content[:2] == ["r|CREATE TABLE r(a INTEGER)\ns|CREATE TABLE s(t)", "18"]


def test_trajectories_that_run_at_once_share_nothing(tool):
    first, second = Trajectory(), Trajectory()

    async def run():
        queries = [(first, "UPDATE r SET a=a+1 RETURNING a"), (second, "UPDATE r SET a=a*3 RETURNING a")]
        return await asyncio.gather(*(call(tool, trajectory, query) for trajectory, query in queries * 3))

    assert asyncio.run(run()) == ["6", "15", "7", "45", "8", "135"]


def test_trajectories_may_run_in_threads(tool):
    totals = []

    def count():
        observations, _ = session(tool, *["UPDATE r SET a=a+1 RETURNING a"] * 50)
        totals.append(observations[-1])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == ["55"] * 4


def test_a_trajectory_may_move_to_another_thread(tool):
    trajectory = Trajectory()
    observations = []
    for _ in range(2):
        work = threading.Thread(
            target=lambda: observations.append(asyncio.run(call(tool, trajectory, "UPDATE r SET a=a+1 RETURNING a")))
        )
        work.start()
        work.join()
    assert observations == ["6", "7"]


def test_a_database_ends_with_its_trajectory(tool):
    trajectory = Trajectory()
    asyncio.run(call(tool, trajectory, "SELECT 1"))
    database = weakref.ref(tool._databases[trajectory])
    gc.collect()
    assert database() is not None
    del trajectory
    gc.collect()
    assert database() is None


def test_nothing_is_kept_between_calls_but_the_database():
    tool = SqliteTool({})
    trajectory = Trajectory()
    asyncio.run(call(tool, trajectory, "SELECT 1"))
    assert not tool._scripts


@pytest.mark.parametrize(
    ("query", "observation"),
    [
        ("SELECT a, 'x', NULL, 1.5, x'ff' FROM r", "5|x|NULL|1.5|x'ff'"),
        ("SELECT 1 UNION SELECT 2 ORDER BY 1", "1\n2"),
        ("SELECT a FROM r WHERE a > 9", "no rows"),
        ("DELETE FROM r", "ok"),
        ("", "ok"),
        ("SELECT cast(x'41ff' AS TEXT)", "A\ufffd"),
    ],
)
def test_results_are_short_text(tool, query, observation):
    assert session(tool, query)[0] == [observation]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELEC a FROM r", "syntax error"),
        ("SELECT b FROM r", "no such column: b"),
        ("UPDATE r SET a=1; UPDATE r SET a=2", "one statement at a time"),
        ("SELECT 'a\0b'", "null character"),
        ("SELECT '\ud800'", "surrogates not allowed"),
        (5, "query must be text"),
        (None, "query must be text"),
    ],
)
def test_an_error_is_an_observation(tool, query, message):
    (error, after), content = session(tool, query, "SELECT a FROM r")
    assert error.startswith("error: ") and message in error
    assert after == "5"
    assert content == session(tool, "SELECT a FROM r")[1]


@pytest.mark.parametrize("parameters", [{}, [], "SELECT 1", None])
def test_arguments_of_another_form_are_an_observation(tool, parameters):
    response, _, _ = asyncio.run(tool.execute("nobody", parameters, agent_data=Known(tool)))
    assert response.text == "error: query must be text"


class Known(Trajectory):
    """A trajectory with an earlier call."""

    def __init__(self, tool):
        asyncio.run(call(tool, self, "SELECT 1"))


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH 'PATH' AS other",
        "ATTACH ':memory:' AS other",
        "DETACH main",
        "VACUUM INTO 'PATH'",
        "PRAGMA max_page_count=1000000000",
        "PRAGMA temp_store_directory='/'",
        "SELECT * FROM pragma_table_info('r')",
        "SELECT load_extension('PATH')",
        "SELECT printf('%*d', 2000000000, 1)",
        "SELECT format('%*d', 2000000000, 1)",
    ],
)
def test_the_world_outside_is_refused(tool, query, tmp_path):
    (error, after), _ = session(tool, query.replace("PATH", str(tmp_path / "file")), "SELECT a FROM r")
    assert error.startswith("error: ") and ("authoriz" in error) and after == "5"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (f"{NUMBERS} SELECT count(*) FROM n", "interrupted"),
        (f"{NUMBERS} INSERT INTO r SELECT x FROM n", "interrupted"),
        (f"{NUMBERS} SELECT x FROM n", "interrupted"),
        (f"{NUMBERS} INSERT INTO r SELECT zeroblob(4000) FROM n", "full"),
        (f"CREATE TEMP TABLE t AS {NUMBERS} SELECT zeroblob(4000) FROM n", "full"),
        ("SELECT zeroblob(1000000000)", "too big"),
        ("WITH RECURSIVE n(x) AS (SELECT 'ab' UNION ALL SELECT x||x FROM n) SELECT length(x) FROM n", "too big"),
        ("SELECT 'a' LIKE '" + "%a" * 40 + "'", "pattern too complex"),
    ],
)
def test_what_would_not_end_or_not_fit_is_stopped(tool, query, message):
    (error, after), content = session(tool, query, "SELECT count(*), max(a) FROM r")
    assert error.startswith("error: ") and message in error
    assert after == "1|5"
    assert content == session(tool, "SELECT a FROM r")[1]


def test_a_long_result_is_cut():
    tool = SqliteTool({"max_characters": 10})
    (text, many), _ = session(tool, "SELECT 'abcdefghijklmnop'", f"{NUMBERS} SELECT x FROM n LIMIT 100")
    assert text == "abcdefghij..."
    assert [SqliteTool({"max_characters": most}).longest_observation for most in (10, 30)] == [len(NOT_TEXT), 33]
    assert many == "1\n2\n3\n4\n5\n..."


statements = st.lists(
    st.one_of(
        st.builds("UPDATE r SET a=a{}{} RETURNING a".format, st.sampled_from("+-*"), st.integers(0, 99)),
        st.builds("INSERT INTO r VALUES({}) RETURNING a".format, st.integers(-99, 99)),
        st.builds("DELETE FROM r WHERE a%{}=0".format, st.integers(1, 5)),
        st.sampled_from(["SELECT sum(a), count(*) FROM r", "CREATE TABLE IF NOT EXISTS s AS SELECT * FROM r"]),
        st.sampled_from(["SELECT a FROM nowhere", "BEGIN", "ROLLBACK", f"{NUMBERS} INSERT INTO r SELECT x FROM n"]),
    ),
    max_size=8,
)


@given(statements)
@settings(max_examples=30)
def test_the_same_statements_make_the_same_database(queries):
    tool = SqliteTool({})
    first, second = (session(tool, "SELECT a FROM r", *queries) for _ in range(2))
    assert first == second


def test_a_script_that_fails_is_the_data_s_fault(tool):
    """verl shows an ``Exception`` to the model, and trains on the answer; other failures end the rollout."""
    agent = Agent(tool, rows={"sql": {"create_kwargs": {"script": "CREATE TABEL r"}}})
    with pytest.raises(DatabaseFailure, match="create_kwargs.script='CREATE TABEL r' is not valid SQL"):
        asyncio.run(agent.call("sql", query="SELECT 1"))


@pytest.mark.parametrize(
    "config",
    [
        {"max_steps": 0},
        {"max_characters": "9"},
        {"max_database_bytes": True},
        {"max_memory_bytes": 1 << 20},
        {"max_cpu_seconds": 0.5},
    ],
)
def test_a_bad_limit_is_refused(config):
    (name,) = config
    with pytest.raises(ValueError, match=f"config.{name}=.* is not valid: use an integer of at least"):
        SqliteTool(config)


def test_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="config.max_rows=.* is not valid: there is no such key, use type, max_steps"):
        SqliteTool({"type": "native", "max_rows": 5})


def test_without_a_script_the_database_is_empty(tool):
    trajectory = Trajectory()

    async def run():
        instance, _ = await tool.create()
        return await tool.execute(instance, {"query": "SELECT count(*) FROM sqlite_master"}, agent_data=trajectory)

    assert asyncio.run(run())[0].text == "0"


def test_verl_loads_and_calls_it(tmp_path):
    """Through verl's registry and loop: two rollouts at once, with one tool between them."""
    path = tmp_path / "tools.yaml"
    path.write_text(
        json.dumps({"tools": [{"class_name": f"{SqliteTool.__module__}.SqliteTool", "config": {"type": "native"}}]})
    )
    tools = initialize_tools_from_config(path)
    assert [tool.name for tool in tools] == ["sql"]
    tokenizer = make_tokenizer()

    async def rollout(start):
        engine = ScriptedEngine(tokenizer, [sql_call("UPDATE r SET a=a+4 RETURNING a")] * 2 + ["done"])
        loop = make_loop("tool_agent", PrefixClient(engine, 1024), tokenizer, tools)
        kwargs = {"sql": {"create_kwargs": {"script": f"CREATE TABLE r(a); INSERT INTO r VALUES({start});"}}}
        output = await loop.run({}, raw_prompt=[{"role": "user", "content": "+4 +4"}], tools_kwargs=kwargs)
        return tokenizer.decode(output.response_ids)

    async def both():
        return await asyncio.gather(rollout(10), rollout(20))

    first, second = asyncio.run(both())
    for text, values in ((first, (14, 18)), (second, (24, 28))):
        assert [f"<tool_response>{value}</tool_response>" in text for value in values] == [True, True]
