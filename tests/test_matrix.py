"""Parts of tests/matrix, which trains for half an hour and is not part of CI."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from matrix import cells
from matrix.cells import AGENT_LOOPS, BASELINE, OPTIONS, RECIPES, STEPS, Option, overrides
from matrix.harness import REFUSED, name_of, page
from matrix.update import difference, first_moments
from support.agent_loops import ScriptedEngine, make_loop, make_tokenizer
from support.configs import compose
from support.training import Task, write_task
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from verl_ext.driver.preflight.validate import BadConfig, validate
from verl_ext.first_run.table import FAILED, PASSED, Row


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize(
    ("recipe", "name"), [*(("grpo", name) for name in OPTIONS), *((recipe, BASELINE) for recipe in RECIPES)]
)
def test_a_cell_gets_past_validation_or_is_refused_with_its_sentence(task, recipe, name, monkeypatch):
    monkeypatch.syspath_prepend(AGENT_LOOPS)  # the harness puts this folder on its runs' path
    option = OPTIONS[name]
    config = compose(recipe, *task.overrides(), *overrides(recipe, option))
    if not option.refusal:
        assert validate(config).step_cost().n == 7
        return
    with pytest.raises(BadConfig, match=option.refusal) as refusal:
        validate(config)
    assert len(refusal.value.sentences) == 1


# ---- the same rollouts ----


@pytest.fixture
def events():
    """One event loop for all agent loops of a test, since verl's agent loops keep the loop that they are made in."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


def answer_of(events, session: int, said: str) -> str:
    tokenizer = make_tokenizer()
    engine = SimpleNamespace(generate=ScriptedEngine(tokenizer, [said]).generate)
    loop = make_loop("same", engine, tokenizer)
    messages = [{"role": "user", "content": "Write a line."}]
    answer = loop.run({}, raw_prompt=messages, extra_info={"index": 1}, session_id=session)
    output = events.run_until_complete(answer)
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    return tokenizer.decode(output.response_ids)


def test_responses_depend_on_prompt_and_session_alone(events, monkeypatch):
    monkeypatch.syspath_prepend(AGENT_LOOPS)
    monkeypatch.setitem(_agent_loop_registry, "same", {"_target_": "same_rollouts.SameRollouts"})
    answers = []
    for session in range(12):
        try:
            answers.append(answer_of(events, session, "one engine"))
        except RuntimeError as error:
            assert "fails in every run" in str(error)
            with pytest.raises(RuntimeError, match="fails in every run"):
                answer_of(events, session, "another engine")
        else:
            assert answer_of(events, session, "another engine") == answers[-1]
    assert 8 <= len(answers) < 12 and len(set(map(len, answers))) > 4


# ---- the update ----


def write_shards(checkpoint, *ranks: list[torch.Tensor], steps: int = STEPS):
    (checkpoint / "actor").mkdir(parents=True)
    for rank, moments in enumerate(ranks):
        state = {name: {"exp_avg": moment, "step": torch.tensor(steps)} for name, moment in enumerate(moments)}
        torch.save({"state": state}, checkpoint / f"actor/optim_world_size_{len(ranks)}_rank_{rank}.pt")


def test_moments_of_all_ranks_are_put_together_in_their_order(tmp_path):
    matrix, vector = torch.arange(22.0).reshape(11, 2), torch.arange(11.0)
    parts = zip(matrix.split(1), vector.split(1), strict=True)
    write_shards(tmp_path, *map(list, parts))  # rank 10 comes after rank 9
    whole = first_moments(tmp_path)
    assert torch.equal(whole[0], matrix) and torch.equal(whole[1], vector)
    assert difference([matrix, vector], whole) == 0
    whole[1][3] += 0.21
    assert difference([matrix, vector], whole) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="shapes"):
        difference([matrix], whole)


# ---- what a cell must show ----

FINE = {
    "rollouts/sampled_total": 21,
    "rollouts/trained_total": 19,
    "rollouts/buffered": 1,
    "rollouts/discarded_total": 0,
    "rollouts/failed_total": 1,
    "rollouts/trained": 19,
    "actor/grad_norm": 3.0,
    "off_policy/delay_max": 0,
    "training/rollout_probs_diff_max": 1e-6,
}


def faults(tmp_path, option: Option, running: dict[str, int], *, updates: int, log: str = "", **changed) -> list[str]:
    write_shards(tmp_path / f"global_step_{STEPS}", [torch.ones(3)], steps=updates)
    steps = {step: FINE | changed for step in range(1, STEPS + 1)}
    run = SimpleNamespace(checkpoints=tmp_path, log=log)
    return list(cells._faults(option, steps, Counter(running), run))


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("", {}),
        ("2 optimizer steps instead of 6", {"updates": 2}),
        ("the books of steps [1, 2] do not balance", {"rollouts/buffered": 2}),
        ("a gradient is not finite", {"actor/grad_norm": float("nan")}),
        ("1 processes worker instead of 2", {"running": {"worker": 1}}),
        ("the log lacks patched .+", {"log": "patched"}),
        ("the engine's probabilities differ from the actor's by 0.01", {"training/rollout_probs_diff_max": 0.01}),
        ("", {"training/rollout_probs_diff_max": 0.01, "off_policy/delay_max": 1}),  # other weights have generated
    ],
)
def test_a_training_is_judged_by_its_metrics_log_and_processes(fault, shown, tmp_path):
    option = Option(processes={"worker": 2}, says="patched .+")
    shown = {"running": {"worker": 2}, "updates": 6, "log": "patched it"} | shown
    assert faults(tmp_path, option, **shown) == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("fault", "moment", "changed"),
    [
        ("", 1.0, {}),
        ("the gradients differ from those of 1 actor rank by 0.001 of the largest", 1.001, {}),
        ("the rollouts of every step divide by 2 ranks", 1.0, {"rollouts/trained": 20}),
        ("no gradient has anything to compare", 1.0, {"actor/grad_norm": 0.0}),
    ],
)
def test_an_update_is_compared_with_that_of_one_rank(fault, moment, changed, tmp_path):
    baseline, checkpoint = tmp_path / "baseline", tmp_path / "checkpoints" / "global_step_2"
    write_shards(baseline / "checkpoints" / "global_step_2", [torch.ones(4)])
    write_shards(checkpoint, [torch.ones(2)], [torch.tensor([1.0, moment])])
    steps = {1: FINE | changed, 2: FINE | changed}
    found = list(cells._update_faults(OPTIONS["2 actor ranks"], steps, checkpoint, baseline))
    assert found == ([fault] if fault else [])


# ---- the page ----


def test_the_page_has_a_row_for_each_option_and_each_sentence_once():
    refused = {
        name_of(recipe, "sequence parallel 2"): Row("", REFUSED, "key=2 is not valid: use 1", 5.0) for recipe in RECIPES
    }
    rows = {
        name_of("grpo", BASELINE): Row("", PASSED, "", 41.4),
        name_of("hora", "LoRA"): Row("", FAILED, "it hangs", 300.0),
    }
    text = "\n".join(page(rows | refused, "Machine: two cores."))
    assert "| 1 actor rank | passed, 41 s | not tried | not tried | yes |" in text
    assert "| LoRA | not tried | failed, 300 s | not tried | – |" in text
    assert "| sequence parallel 2 | refused (1) | refused (1) | refused (1) | – |" in text
    assert text.count("key=2 is not valid: use 1") == 1 and "Machine: two cores." in text
    assert all(f"\n| {name} | " in text for name in OPTIONS)
