"""A world has the wanted distribution of exact success probabilities, and is made once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from support.learner import trained_model

from verl_ext.lab.learn.sampler import success_rates
from verl_ext.lab.learn.tasks import TASKS
from verl_ext.lab.learn.worlds import CLASSES, HELD_OUT, ROOM, TAIL, WORLDS, WorldSource, draw_problems


def classes(rates) -> Counter:
    return Counter(name for rate in rates for name, (low, high) in CLASSES.items() if low <= rate <= high)


def test_the_shares_of_every_world_sum_to_one():
    assert all(sum(mix.shares.values()) == pytest.approx(1) for mix in WORLDS.values())


def test_problems_are_drawn_by_their_exact_success_rates():
    torch.set_num_threads(1)
    model, task = trained_model("words"), TASKS["words"]
    train, held_out, rates = draw_problems(model, task, {"learnable": 0.25, "hopeless": 0.75}, 40)
    assert (len(train), len(held_out)) == (40, HELD_OUT)
    np.testing.assert_allclose(success_rates(model, task, train, 1.0), rates, rtol=1e-4)
    assert (classes(rates)["learnable"], classes(rates)["hopeless"]) == (10, 30)
    held = classes(success_rates(model, task, held_out, 1.0))
    assert (held["learnable"], held["hopeless"]) == (HELD_OUT // 4, 3 * HELD_OUT // 4)
    prompts = [problem.prompt for problem in (*train, *held_out)]
    assert len(set(prompts)) == len(prompts)


def test_a_class_that_the_model_does_not_have_is_named():
    with pytest.raises(ValueError, match="task=words: too few prompts are solved for the warm-started model"):
        draw_problems(trained_model("words"), TASKS["words"], {"solved": 1.0}, 40)


def test_a_warm_start_is_made_once(few_prompts):
    made = {path: path.stat().st_mtime_ns for path in few_prompts.cache.iterdir()}
    assert len(made) == 2
    world = few_prompts.load()
    found = classes(world.rates)
    assert [found[name] for name in TAIL] == [102, 64, 90]
    assert len(world.held_out) == HELD_OUT and sum(p.numel() for p in world.make_model().parameters()) < 65_000
    rates = success_rates(world.make_model(), world.task, world.train, 1.0)
    np.testing.assert_allclose(rates, world.rates, rtol=1e-4)
    again = few_prompts.load()
    assert [problem.prompt for problem in again.train] == [problem.prompt for problem in world.train]
    assert {path: path.stat().st_mtime_ns for path in few_prompts.cache.iterdir()} == made


@pytest.fixture
def trained_at_once(monkeypatch):
    """In place of the warm start, which takes long, a model that has been trained; and few problems are drawn."""
    monkeypatch.setattr("verl_ext.lab.learn.worlds.warm_start", lambda task, on_step: trained_model(task.name))
    monkeypatch.setattr("verl_ext.lab.learn.worlds.HELD_OUT", 8)
    monkeypatch.setattr("verl_ext.lab.learn.worlds.CHUNK", 256)


def test_a_kept_world_is_of_its_size(tmp_path, trained_at_once):
    sources = [WorldSource("all_medium", "words", prompts, tmp_path) for prompts in (12, 4)]
    made = [source.load() for source in sources]
    kept = [source.load() for source in sources]
    for source, world, again in zip(sources, made, kept, strict=True):
        assert world.name == again.name == "words_all_medium" and len(world.train) == source.prompts
        for one, same in zip((*world.train, *world.held_out), (*again.train, *again.held_out), strict=True):
            assert (one.prompt, one.level, one.shift) == (same.prompt, same.level, same.shift)
            assert np.array_equal(one.reference.tokens, same.reference.tokens)
            assert np.array_equal(one.reference.generated, same.reference.generated)
        longest = max(len(problem.reference) for problem in (*world.train, *world.held_out))
        assert world.limit == again.limit == longest + ROOM
    one, other = kept[0].make_model(), kept[0].make_model()
    with torch.no_grad():
        next(iter(one.parameters())).zero_()
    rates = success_rates(other, kept[0].task, kept[0].train, 1.0)
    np.testing.assert_allclose(rates, kept[0].rates, rtol=1e-4)
    assert len(list(tmp_path.iterdir())) == 3  # a model and two sets of problems


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "easy"}, "world=easy is not valid: use one of long_tailed"),
        ({"task": "chess"}, "task=chess is not valid: use one of words, sums, tool"),
        ({"prompts": 0}, "prompts=0 is not valid"),
    ],
)
def test_what_is_no_world_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WorldSource(**arguments)
