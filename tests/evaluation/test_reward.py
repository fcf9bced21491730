"""Which reward function judges, and what it is given as an answer."""

from __future__ import annotations

import pytest

from verl_ext.evaluation import reward


def test_reward_functions_load_as_verl_loads_them(tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(*_):\n    return {'acc': 1}\n")
    for path in (f"file://{tmp_path / 'reward.py'}", str(tmp_path / "reward.py")):
        assert reward.load(path, "compute_score")("b", "1", "1", {"hint": "1"})["acc"] == 1
    for path in ("pkg://verl_ext.data.swe_reward", "pkg://verl_ext/data/swe_reward"):
        assert reward.load(path, "compute_score")("b", "", "", {"tests_passed": True})["score"] == 1


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so <answer> 4 </answer>, no, <answer>5</answer>", "5"),
        (r"\boxed{1} then \boxed{\frac{1}{2}} .", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("<answer></answer>", None),
        ("four", None),
    ],
)
def test_answers_are_found_where_they_are_marked(response, answer):
    assert reward.answer_of(response) == answer
    assert reward.answer_of(response, "text") == response


def test_without_a_path_the_reward_is_verls_own():
    assert reward.choose(None, None) == ("pkg://verl.utils.reward_score", "default_compute_score")
    assert reward.choose("r.py", None) == ("r.py", "compute_score")
    assert reward.choose("r.py", "judge") == ("r.py", "judge")
    with pytest.raises(ValueError, match="reward-name=judge needs"):
        reward.choose(None, "judge")
