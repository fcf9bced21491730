"""The sampler draws from the distribution that teacher forcing computes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from support.learner import LEVELS, draw, trained_model

from verl_ext.lab.learn.sampler import Response, Start, log_probs, most_likely, sample, success_rates
from verl_ext.lab.learn.tasks import CALL, END, LETTERS, PAD, START, TASKS, Problem, generated
from verl_ext.sampling import Sampling
from verl_ext.trajectory import Trajectory


def draw_responses(task, starts, counts, limit=12, temperature=1.0, seed=0) -> list[Response]:
    generator = torch.Generator().manual_seed(seed)
    settings = {"limit": limit, "temperature": temperature, "generator": generator}
    return sample(trained_model(task), TASKS[task], starts, counts, **settings)


@pytest.mark.parametrize("task", list(LEVELS))
def test_log_probs_of_samples_are_those_of_teacher_forcing(task):
    problems = draw(task, 30)
    counts = [1 + place % 4 for place in range(30)]
    responses = draw_responses(task, [Start(problem) for problem in problems], counts, limit=24, temperature=0.7)
    prompts = [problem.prompt for problem, count in zip(problems, counts, strict=True) for _ in range(count)]
    assert len(responses) == len(prompts) == sum(counts)
    tokens = [response.tokens for response in responses]
    with torch.no_grad():
        scores = log_probs(trained_model(task), prompts, tokens, 0.7, PAD).numpy()
    for response, row in zip(responses, scores, strict=True):
        np.testing.assert_allclose(response.log_probs, row[: len(response.tokens)] * response.by_policy, atol=2e-5)
        assert (response.tokens[-1] == END) == (not response.truncated)
        assert END not in response.tokens[:-1][response.by_policy[:-1]]


def test_responses_have_their_exact_frequencies():
    """All responses of at most two tokens to one prompt: their exact probabilities against 20,000 samples."""
    model, problem = trained_model("words"), Problem((1, 2, START), generated([2, 1, END]), 2)
    count = 20_000
    responses = draw_responses("words", [Start(problem)], [count], limit=2, seed=1)
    found = Counter(tuple(response.tokens.tolist()) for response in responses)
    vocabulary = range(LETTERS + 4)
    possible = [(END,), *((one, two) for one, two in product(vocabulary, vocabulary) if one != END)]
    with torch.no_grad():
        scores = log_probs(model, [problem.prompt] * len(possible), [np.array(each) for each in possible], 1.0, PAD)
    exact = scores.double().sum(1).exp().numpy()
    assert exact.sum() == pytest.approx(1, abs=1e-5)
    seen = np.array([found[each] for each in possible])
    assert seen.sum() == count
    common = exact * count >= 5
    chi_squared = float(((seen - exact * count) ** 2 / (exact * count))[common].sum())
    degrees = int(common.sum())
    assert degrees > 10 and chi_squared < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("task", list(LEVELS))
def test_exact_success_rates_are_the_shares_of_correct_samples(task):
    problems = draw(task, 8)
    rates = success_rates(trained_model(task), TASKS[task], problems, 1.0)
    count = 1000
    responses = draw_responses(task, [Start(problem) for problem in problems], [count] * 8, limit=24, seed=2)
    correct = [
        np.mean([np.array_equal(each.tokens, problem.reference.tokens) for each in responses[at : at + count]])
        for at, problem in zip(range(0, 8 * count, count), problems, strict=True)
    ]
    assert 0.01 < rates.mean() < 0.99
    np.testing.assert_allclose(correct, rates, atol=4 * 0.5 / count**0.5)


def test_a_prefix_is_given_and_counts_toward_the_limit():
    problem = next(problem for problem in draw("words", 20) if problem.level == 4)
    prefix = problem.reference.prefix(0.5)
    responses = draw_responses("words", [Start(problem, prefix), Start(problem)], [50, 50], limit=4)
    for response in responses[:50]:
        assert response.tokens[:2].tolist() == prefix.tokens.tolist()
        assert response.by_policy.tolist() == [False, False] + [True] * (len(response.tokens) - 2)
        assert not response.log_probs[:2].any() and response.log_probs[2:].all()
    assert max(len(response.tokens) for response in responses) == 4
    assert any(response.truncated for response in responses)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_the_environment_answers_a_whole_turn_whatever_part_of_it_is_a_prefix(given):
    task, problem = (
        TASKS["tool"],
        max(draw("tool", 20), key=lambda problem: problem.reference.tokens.tolist().index(CALL)),
    )
    prefix = Trajectory(problem.reference.tokens[:given], np.ones(given, bool)) if given else None
    responses = draw_responses("tool", [Start(problem, prefix)], [50], limit=24)
    called = [response.tokens.tolist() for response in responses if CALL in response.tokens[:-1]]
    assert called
    for tokens in called:
        end = tokens.index(CALL)
        answer = list(task.observe(problem, tokens[:end]))
        assert tokens[end + 1 : end + 1 + len(answer)] == answer


@pytest.mark.parametrize("task", ["words", "tool"])
def test_the_turn_of_a_start_begins_after_its_last_observation(task):
    problem = draw(task, 1)[0]
    assert Start(problem).begun_turn == []
    reference = problem.reference
    for length in range(1, len(reference.tokens)):
        prefix = Trajectory(reference.tokens[:length], reference.generated[:length])
        expected = []
        for token, by_policy in zip(prefix.tokens.tolist(), prefix.generated, strict=True):
            expected = [*expected, token] if by_policy else []
        assert Start(problem, prefix).begun_turn == expected


def test_a_start_has_its_own_temperature_and_limit():
    problems = draw("words", 6)
    hot = [Start(problem, sampling=Sampling(temperature=1.7, response_length=3)) for problem in problems]
    mixed = draw_responses("words", [*hot, *map(Start, problems)], [40] * 12)
    assert max(len(response.tokens) for response in mixed[:240]) == 3 < max(len(each.tokens) for each in mixed[240:])
    for responses, temperature in ((mixed[:240], 1.7), (mixed[240:], 1.0)):
        prompts = [problem.prompt for problem in problems for _ in range(40)]
        tokens = [response.tokens for response in responses]
        with torch.no_grad():
            scores = log_probs(trained_model("words"), prompts, tokens, temperature, PAD).numpy()
        for response, row in zip(responses, scores, strict=True):
            np.testing.assert_allclose(response.log_probs, row[: len(response.tokens)], atol=2e-5)


def test_only_the_most_likely_tokens_are_sampled():
    problems = draw("words", 4)
    greedy = [Start(problem, sampling=Sampling(top_p=1e-6)) for problem in problems]
    responses = draw_responses("words", [*greedy, *map(Start, problems)], [30] * 8)
    for at in range(4):
        assert len({tuple(each.tokens.tolist()) for each in responses[30 * at : 30 * at + 30]}) == 1
        assert len({tuple(each.tokens.tolist()) for each in responses[120 + 30 * at : 150 + 30 * at]}) > 1
    assert not any(response.log_probs.any() for response in responses[:120])
    likely = most_likely(torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]).log(), torch.tensor([[0.6], [0.4]]))
    np.testing.assert_allclose(likely.exp(), [[0, 0.625, 0.375], [0, 1, 0]], atol=1e-6)


def test_the_tool_answers_the_call_as_it_was_made():
    problem = next(problem for problem in draw("tool", 20) if problem.level == 2)
    responses = draw_responses("tool", [Start(problem)], [300], limit=24)
    called = [response for response in responses if CALL in response.tokens[response.by_policy].tolist()]
    assert called
    for response in called:
        tokens = response.tokens.tolist()
        end = tokens.index(CALL)
        answer = TASKS["tool"].observe(problem, tokens[:end])
        given = tokens[end + 1 : end + 1 + len(answer)]
        assert given == list(answer)[: len(given)]
        assert not response.by_policy[end + 1 : end + 1 + len(given)].any()


def test_the_tool_answers_each_of_several_calls():
    problem = next(problem for problem in draw("tool", 20) if problem.level == 2)
    responses = draw_responses("tool", [Start(problem)], [600], limit=24, temperature=2.0)
    answered = 0
    for response in responses:
        trajectory, called = Trajectory(response.tokens, response.by_policy), 0
        for span, answer in zip(trajectory.spans, trajectory.spans[1:], strict=False):
            if span.generated:
                called += 1
                turn = response.tokens[span.start : span.stop].tolist()
                expected = TASKS["tool"].observe(problem, turn[:-1])
                given = response.tokens[answer.start : answer.stop].tolist()
                assert turn[-1] == CALL and given == list(expected)[: len(given)]
        answered += called > 1
    assert answered > 10


def test_the_same_seed_gives_the_same_responses():
    starts = [Start(problem) for problem in draw("words", 5)]
    one, same, other = (draw_responses("words", starts, [8] * 5, seed=seed) for seed in (0, 0, 1))
    assert [each.tokens.tolist() for each in one] == [each.tokens.tolist() for each in same]
    assert [each.tokens.tolist() for each in one] != [each.tokens.tolist() for each in other]
