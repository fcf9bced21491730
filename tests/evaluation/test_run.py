"""The whole command against a small server that answers from a list."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations

import pyarrow
import pytest
import typer
from pyarrow import parquet
from typer.testing import CliRunner

from verl_ext.evaluation.run import evaluate

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **_):
    assert extra_info["hint"] == ground_truth
    correct = float(solution_str == ground_truth)
    return {"score": correct + bonus, "acc": correct, "pred": solution_str}
"""
# What the server answers to each prompt, in turn: 3, 1 and 0 of 4 are correct.
ANSWERS = {"one": ["1", "1", "0", "1"], "two": ["2", "0", "0", "9"], "three": ["0", "0", "9", "9"]}
TRUTH = {"one": "1", "two": "2", "three": "3"}


class FakeServer(ThreadingHTTPServer):
    """An OpenAI-compatible server; ``limit``: how many requests it answers before it drops all further ones."""

    daemon_threads = True

    def __init__(self, limit=10**9, failures=(), delay=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.limit, self.failures, self.delay = limit, list(failures), delay
        self.requests, self.headers_seen, self.lock = [], [], threading.Lock()
        self.given, self.active, self.most_active = defaultdict(int), 0, 0
        self.answers = ANSWERS
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.active += 1
            server.most_active = max(server.most_active, server.active)
        time.sleep(server.delay)
        with server.lock:
            server.active -= 1
            if len(server.requests) >= server.limit:
                self.close_connection = True
                return
            if server.failures:
                self.reply(server.failures.pop(0), {"error": "not now"})
                return
            if self.path != "/v1/chat/completions" or body["model"] != "tiny":
                self.reply(404, {"error": f"The model {body['model']} does not exist."})
                return
            server.requests.append(body)
            server.headers_seen.append(dict(self.headers))
            prompt = body["messages"][-1]["content"]
            answers = server.answers[prompt]
            text = answers[server.given[prompt] % len(answers)]
            server.given[prompt] += 1
            reason = "length" if text == "9" else "stop"
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
            self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(**arguments):
        servers.append(FakeServer(**arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def row(name, source="bench", **changes):
    return {
        "prompt": [{"role": "user", "content": name}],
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": TRUTH[name]},
        "extra_info": {"hint": TRUTH[name]},
        **changes,
    }


def write(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "reward.py").write_text(REWARD)
    write(tmp_path / "bench.parquet", [row("one"), row("two"), row("three", "other")])
    return tmp_path


def invoke(folder, server, *arguments, n=4, data="bench.parquet", out="out"):
    app = typer.Typer()
    app.command()(evaluate)
    address = getattr(server, "url", server)
    given = ["--data", folder / data, "--out", folder / out]
    given += ["--server", address, "--model", "tiny"] if address else []
    given += ["--n", n, "--reward", folder / "reward.py", "--concurrency", 3, "--retries", 2, "--pause", 0, *arguments]
    return CliRunner().invoke(app, [str(argument) for argument in given], env={"COLUMNS": "400"})


def results(folder, out="out"):
    return json.loads((folder / out / "results.json").read_text())


def lines(folder):
    return [json.loads(line) for line in (folder / "out" / "responses.jsonl").read_text().splitlines()]


def share(hits):
    hits = list(hits)
    return pytest.approx(sum(hits) / len(hits), abs=1e-12)


def majority_of(subset, truth):
    votes = Counter(subset)
    winners = [answer for answer in votes if votes[answer] == max(votes.values())]
    return (truth in winners) / len(winners)


def test_results_are_what_the_servers_answers_imply(folder, serve):
    server = serve()
    result = invoke(folder, server, "--temperature", 0.6, "--max-tokens", 64, "--body", '{"top_k": 20}')
    assert result.exit_code == 0, result.output
    found = results(folder)
    bench, other = found["benchmarks"]["bench"], found["benchmarks"]["other"]
    assert (bench["problems"], other["problems"]) == (2, 1)
    assert bench["mean@k"] == 0.5 and other["mean@k"] == 0
    for k in (1, 2, 4):
        subsets = {prompt: list(combinations(ANSWERS[prompt], k)) for prompt in ("one", "two")}
        passed = (TRUTH[prompt] in subset for prompt in subsets for subset in subsets[prompt])
        right = (majority_of(subset, TRUTH[prompt]) for prompt in subsets for subset in subsets[prompt])
        assert bench["pass@k"][str(k)] == share(passed)
        assert bench["maj@k"][str(k)] == share(right)
    assert set(bench["pass@k"]) == {"1", "2", "4"}
    assert set(other["pass@k"].values()) == {0.0} == set(other["maj@k_standard_error"].values())
    assert (bench["cut"], other["cut"], bench["tokens"], bench["answered"]) == (1 / 8, 1 / 2, 7, 1)
    assert (folder / "out" / "pass_at_k.png").read_bytes().startswith(b"\x89PNG")
    assert "pass@k" in result.output and "maj@k" in result.output and "other" in result.output

    assert len(server.requests) == len(lines(folder)) == 12
    assert {(body["temperature"], body["top_k"], body["max_tokens"]) for body in server.requests} == {(0.6, 20, 64)}
    assert len({body["seed"] for body in server.requests}) == 12
    assert server.most_active <= 3
    assert not any("Authorization" in headers for headers in server.headers_seen)


def test_an_interrupted_evaluation_goes_on_with_what_is_missing(folder, serve):
    gone = serve(limit=5)
    result = invoke(folder, gone)
    assert result.exit_code == 1
    assert f"server={gone.url} does not answer after 3 attempts" in result.output
    assert "5 of 12 responses are in" in result.output and "goes on from there" in result.output
    assert len(lines(folder)) == 5 and not (folder / "out" / "results.json").exists()

    back = serve()
    back.given = gone.given  # so that each prompt's answers go on, too
    result = invoke(folder, back)
    assert result.exit_code == 0, result.output
    assert len(back.requests) == 7 and len(lines(folder)) == 12
    assert not {body["seed"] for body in gone.requests} & {body["seed"] for body in back.requests}
    assert results(folder)["benchmarks"]["bench"]["mean@k"] == 0.5

    again = serve()
    assert invoke(folder, again, "--k", "1,3").exit_code == 0
    assert not again.requests and set(results(folder)["benchmarks"]["bench"]["pass@k"]) == {"1", "3"}
    assert invoke(folder, again, n=6).exit_code == 0
    assert len(again.requests) == 6  # two more for each of three problems


def test_rows_may_move_between_two_starts(folder, serve):
    assert invoke(folder, serve()).exit_code == 0
    write(folder / "bench.parquet", [row("three", "other"), row("one"), row("two"), row("one")])
    server = serve()
    result = invoke(folder, server)
    assert result.exit_code == 0 and not server.requests
    assert "1 rows repeat a problem" in result.output and results(folder)["repeated_rows"] == 1


def test_lines_that_cannot_be_used_are_counted_and_sampled_again(folder, serve):
    assert invoke(folder, serve()).exit_code == 0
    path = folder / "out" / "responses.jsonl"
    good = path.read_text().splitlines()
    wrong = json.dumps({**json.loads(good[1]), "accuracy": None})
    huge = good[1].replace('"tokens": 7', '"tokens": 1e999')
    path.write_text("\n".join([good[0], good[0], "{", "[]", wrong, huge, *good[2:-1], good[-1][:-9]]))
    server = serve()
    result = invoke(folder, server)
    assert result.exit_code == 0, result.output
    assert results(folder)["lines"] == {"truncated": 1, "malformed": 4, "repeated": 1}
    assert "1 truncated line(s), not used" in result.output and "4 malformed line(s), not used" in result.output
    assert len(server.requests) == 2
    assert json.loads(path.read_text().splitlines()[-1])["sample"] in range(4)

    assert invoke(folder, server).exit_code == 0
    assert results(folder)["lines"]["truncated"] == 0 and len(server.requests) == 2


def test_a_busy_server_is_asked_again_and_a_refusal_is_final(folder, serve):
    server = serve(failures=[503, 429])
    assert invoke(folder, server).exit_code == 0
    assert len(server.requests) == 12

    result = invoke(folder, serve(), "--model", "huge", out="huge")
    assert result.exit_code == 1
    assert "refuses the request: HTTP 404" in result.output and "The model huge does not exist." in result.output

    result = invoke(folder, "http://127.0.0.1:9/v1", out="nobody")
    assert result.exit_code == 1 and "does not answer after 3 attempts; the last: ConnectError" in result.output


def test_other_settings_are_refused_in_the_same_folder(folder, serve):
    server = serve()
    assert invoke(folder, server).exit_code == 0
    result = invoke(folder, server, "--seed", 5)
    assert result.exit_code == 2 and "seed=5, but the responses in" in result.output and "seed=0" in result.output
    result = invoke(folder, server, "--reward-argument", "bonus=0.5")
    assert result.exit_code == 2 and "reward-argument={'bonus': 0.5}" in result.output
    assert len(server.requests) == 12


def test_settings_bind_only_once_there_is_a_response(folder, serve):
    result = invoke(folder, serve(), "--model", "huge")
    assert result.exit_code == 1 and "0 of 12 responses" in result.output
    assert invoke(folder, serve(limit=5)).exit_code == 1
    result = invoke(folder, serve(), "--model", "huge")
    assert result.exit_code == 2 and "model='huge', but the responses in" in result.output

    (folder / "other").mkdir()
    (folder / "other/settings.json").write_text('{"color": "red"}')
    result = invoke(folder, serve(), out="other")
    assert result.exit_code == 2 and (folder / "other/settings.json").read_text() == '{"color": "red"}'


def test_two_evaluations_do_not_write_one_file(folder, serve):
    (folder / "out").mkdir()
    with open(folder / "out" / "responses.jsonl", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = invoke(folder, serve())
    assert result.exit_code == 2 and "being written by another evaluation" in result.output


def test_the_api_key_is_sent_and_kept_nowhere(folder, serve):
    server = serve()
    assert invoke(folder, server, "--api-key", "secret-key").exit_code == 0
    assert {headers["Authorization"] for headers in server.headers_seen} == {"Bearer secret-key"}
    texts = [path.read_text() for path in (folder / "out").iterdir() if path.suffix in (".json", ".jsonl")]
    assert len(texts) == 3 and not any("secret-key" in text for text in texts)


def test_a_function_that_is_a_coroutine_and_returns_a_number(folder, serve):
    (folder / "reward.py").write_text(
        "async def judge(data_source, solution_str, ground_truth, extra_info, scale):\n"
        "    return scale * (ground_truth in solution_str)\n"
    )
    server = serve()
    server.answers = {"one": ["<answer>1</answer>", "\\boxed{1}"], "two": ["2", "x"], "three": ["x", ""]}
    arguments = ["--reward-name", "judge", "--reward-argument", "scale=0.5", "--correct-from", 0.5]
    result = invoke(folder, server, *arguments, n=2)
    assert result.exit_code == 0, result.output
    bench, other = (results(folder)["benchmarks"][name] for name in ("bench", "other"))
    assert bench["mean@k"] == 0.375 and bench["pass@k"] == {"1": 0.75, "2": 1.0}
    assert bench["maj@k"] == {"1": 0.5, "2": 0.5} and bench["answered"] == 0.5
    assert other["maj@k"] is None and "no answers" in result.output


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def compute_score(**_):\n    raise KeyError('entry')\n", "raised KeyError on a response of data_source="),
        (
            "def compute_score(**_):\n    return {'acc': 1.0}\n",
            "a dictionary with a number as 'score'",
        ),
        ("def compute_score(**_):\n    return float('nan')\n", "which is not finite"),
    ],
)
def test_a_reward_function_that_fails_ends_the_evaluation(folder, serve, code, said):
    (folder / "reward.py").write_text(code)
    result = invoke(folder, serve())
    assert result.exit_code == 1 and said in result.output and "0 of 12 responses" in result.output


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": [{"role": "user", "content": "one"}], "data_source": "b"}], "has no column 'reward_model'"),
        ([row("one"), row("two", prompt=[])], "row 1: prompt=[] must be a list of messages"),
        ([row("one", prompt="one")], "row 0: prompt='one' must be a list of messages"),
        ([row("one", prompt=[{"content": "one"}])], "has a message without a role"),
        ([row("one", "")], "data_source='' must be the benchmark's name"),
        ([row("one", reward_model={"style": "rule"})], "reward_model={'style': 'rule'} must have a ground_truth"),
    ],
)
def test_bad_data_is_refused_before_any_request(folder, serve, rows, said):
    server = serve()
    write(folder / "bad.parquet", rows)
    result = invoke(folder, server, data="bad.parquet")
    assert result.exit_code == 2 and said in result.output
    assert not server.requests and not (folder / "out").exists()


def test_files_that_are_not_parquet_are_refused(folder):
    (folder / "text.parquet").write_text("no")
    for name in ("text.parquet", "none.parquet"):
        result = invoke(folder, "http://127.0.0.1:9/v1", data=name)
        assert result.exit_code == 2 and f"{name} cannot be read as a parquet file" in result.output
    parquet.write_table(parquet.read_table(folder / "bench.parquet").slice(0, 0), folder / "empty.parquet")
    result = invoke(folder, "http://127.0.0.1:9/v1", data="empty.parquet")
    assert result.exit_code == 2 and "holds no row" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--k", "1,8"], "k=8 is more than n=4"),
        (["--k", "0"], "k='0' must be a whole number of at least 1"),
        (["--k", ""], "must be whole numbers in [1, 4]"),
        (["--server", "localhost:8000"], "server='localhost:8000' must be an address"),
        (["--body", "["], "is not JSON"),
        (["--body", '{"n": 4}'], "must not set 'n'"),
        (["--answers", "last"], "answers='last' must be one of marked, text"),
        (["--reward", "none.py"], "reward=none.py cannot be loaded: FileNotFoundError: there is no such file"),
        (["--reward", "pkg://verl_ext.none"], "reward=pkg://verl_ext.none cannot be loaded: ModuleNotFoundError"),
        (["--reward-name", "other"], "reward-name=other"),
        (["--reward-argument", "scale"], "reward-argument='scale' must be of the form key=value"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(folder, arguments, said):
    result = invoke(folder, "http://127.0.0.1:9/v1", *arguments)
    assert result.exit_code == 2 and said in result.output, result.output
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "checkpoint=None and server=None: one of them must be given"),
        (["--server", "http://h/v1"], "model=None must be the name that the model has on server=http://h/v1"),
        (
            ["--server", "http://h/v1", "--model", "m", "--server-args", "-x"],
            "server-args='-x' belongs to --checkpoint",
        ),
        (["--checkpoint", "c", "--server", "http://h/v1"], "checkpoint=c and server=http://h/v1 exclude each other"),
        (["--checkpoint", "c", "--model", "m"], "model='m' belongs to --server"),
        (["--checkpoint", "none"], "checkpoint=none must be a folder"),
    ],
)
def test_responses_come_from_a_checkpoint_or_a_server(folder, arguments, said):
    result = invoke(folder, None, *arguments)
    assert result.exit_code == 2 and said in result.output, result.output
    assert not (folder / "out").exists()


def test_no_proxy_is_asked_for_a_server_on_this_machine(folder, serve, monkeypatch):
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert invoke(folder, serve()).exit_code == 0
