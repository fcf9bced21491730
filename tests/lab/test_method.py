from __future__ import annotations

import pytest

from recipe.hora.policy import Hora
from recipe.pilot_commit.policy import PilotCommit
from verl_ext.lab.method import Method, check_prompts, recipe_panels, recipes
from verl_ext.lab.waste.counterfactual import recipe_method
from verl_ext.policy import RolloutPolicy


class Unmade(RolloutPolicy):
    def __init__(self, **settings):
        self.share = settings["share"]


class Bare(RolloutPolicy):
    """No setting."""


@pytest.mark.parametrize("size", ["null", "x", "0"])
def test_a_batch_of_no_size_is_refused_with_its_key(size):
    method = Method.parse(f"grpo train_batch_size={size}", 4)
    with pytest.raises(ValueError, match=f"^rollout_policy.train_batch_size={size} is not valid: use an integer of at"):
        check_prompts(method, 40)


def test_every_recipe_is_there_and_is_what_its_own_file_says():
    assert list(recipes()) == [
        "dynamic_sampling",
        "greso",
        "grpo",
        "hora",
        "knapsack",
        "mopps",
        "pilot_commit",
        "pods",
        "prefix_sampling",
        "recall",
        "reinforce_ada",
        "speed_rl",
        "vip",
    ]
    for name in recipes():
        method = Method.parse(name, 8)
        assert (method.name, method.train_batch_size) == (name, 8)


def test_defaults_are_the_recipes_and_overrides_win():
    policy = Method.parse("pilot_commit n_pilot=8 p_solve=null rollout_policy.order=oldest", 4).policy(seed=3)
    assert isinstance(policy, PilotCommit)
    assert (policy.n_pilot, policy.n_commit, policy.train_batch_size) == (8, 48, 4)
    assert policy.filter.p_solve is None and policy.buffer.order == "oldest"


def test_what_a_recipe_refers_to_can_be_set_where_it_is():
    policy = Method.parse("hora actor_rollout_ref.rollout.n=24 data.train_batch_size=6", 8).policy(seed=0)
    assert isinstance(policy, Hora)
    assert (policy.G, policy.train_batch_size) == (24, 6)


def test_names_tell_what_was_overridden_or_are_given():
    assert Method.parse("grpo n=8", 4).name == "grpo-n=8"
    assert Method.parse("small:grpo n=8", 4).name == "small"


def test_a_policy_of_ones_own_is_named_by_its_file(tmp_path):
    file = tmp_path / "mine.yaml"
    target = "_target_: recipe.grpo.policy.Uniform"
    file.write_text(f"rollout_policy:\n  {target}\n  train_batch_size: ${{data.train_batch_size}}\n  n: 4\n")
    method = Method.parse(f"{file} n=6", 8)
    assert method.name == "mine-n=6"
    assert (method.policy(seed=0).n, method.train_batch_size) == (6, 8)
    file.write_text("policy: {}")
    with pytest.raises(ValueError, match="a .yaml file that has rollout_policy"):
        Method.parse(str(file), 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with one of"),
        ("ppo", "begins with one of dynamic_sampling, greso, grpo"),
        ("grpo n", "n must be written as key=value"),
    ],
)
def test_what_is_no_method_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Method.parse(text, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo n=1", "rollout_policy.n=1"),
        ("grpo m=3", "unexpected keyword argument 'm'"),
        ("hora Go=2", r"^rollout_policy.Go=2 is not valid: .*Hora takes .*G0"),
        (f"grpo _target_={__name__}.Unmade", "^rollout_policy cannot be made: KeyError: 'share'$"),
        (f"grpo _target_={__name__}.Bare", "^rollout_policy.train_batch_size=4 is not valid: .*Bare takes none$"),
    ],
)
def test_what_a_policy_refuses_is_refused_in_its_words(text, message):
    with pytest.raises(ValueError, match=message):
        Method.parse(text, 4).policy(seed=0)


@pytest.mark.parametrize(
    ("recipe", "key", "valid"),
    [
        *((recipe, "prompt_weight", "equal, rollouts") for recipe in recipes()),
        ("pods", "baseline", "trained, all"),
        ("reinforce_ada", "baseline", "trained, all"),
    ],
)
def test_attributes_that_no_constructor_checks_are_refused(recipe, key, valid):
    with pytest.raises(ValueError, match=f"^rollout_policy.{key}=x is not valid: use one of {valid}$"):
        Method.parse(f"{recipe} {key}=x", 4).policy(seed=0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "{n: 4}",
            "_target_=null is not valid: it must name a subclass of verl_ext.policy.RolloutPolicy",
        ),
        (
            "{_target_: nosuch.Policy}",
            r"^rollout_policy._target_=nosuch.Policy is not valid: it cannot be imported \(.*",
        ),
        (
            "{_target_: recipe.grpo.policy.Unform}",
            "_target_=recipe.grpo.policy.Unform is not valid: it cannot be",
        ),
        ("{_target_: collections.OrderedDict}", "OrderedDict is not valid: it must name a subclass"),
        ("3", "a .yaml file that has rollout_policy"),
        ("{", r"mine.yaml cannot be read \(while parsing a flow node"),
    ],
)
def test_a_file_without_a_policy_is_refused_in_one_sentence(section, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"rollout_policy: {section}\n")
    with pytest.raises(ValueError, match=message):
        Method.parse(str(file), 8).policy(seed=0)


def test_only_estimators_over_texts_need_stand_ins():
    assert Method.parse("vip", 4).reads_texts
    assert not Method.parse("vip estimator=history", 4).reads_texts
    assert not Method.parse("vip rollout_policy.estimator_options.features=x.npy", 4).reads_texts
    assert not Method.parse("grpo", 4).reads_texts


def test_a_recipe_that_is_not_finished_has_no_panels_and_hides_none(tmp_path, monkeypatch):
    before = recipe_panels()
    plots = "from verl_ext.policy import *\nclass Plots(RolloutPolicy):\n    panels = "
    for name, config, policy in (
        ("halfway", "_target_: recipe.halfway.policy.Halfway", "def"),
        ("unread", "{", ""),
        ("commaless", "_target_: recipe.commaless.policy.Plots", f"{plots}(Panel('a', '(b)', 'c', 'd', 'e'))"),
        ("quoted", "_target_: recipe.quoted.policy.Plots", f"{plots}'plots'"),
        ("nogroup", "_target_: recipe.nogroup.policy.Plots", f"{plots}(Panel('a', 'b', 'c', 'd', 'e'),)"),
    ):
        folder = tmp_path / "recipe" / name
        (folder / "config").mkdir(parents=True)
        (folder / "config" / f"{name}.yaml").write_text(f"rollout_policy:\n  {config}\n")
        (folder / "policy.py").write_text(policy)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"halfway", "unread"} <= recipes().keys()
    assert before and recipe_panels() == before
    for name, message in (("halfway", "it cannot be imported"), ("unread", "unread.yaml cannot be read")):
        with pytest.raises(ValueError, match=message):
            recipe_method(Method.parse(name, 4), 8, 0, texts=False)
