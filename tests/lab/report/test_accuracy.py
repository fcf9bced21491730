"""A run's validations."""

import pytest
from support.runs import training_steps

from verl_ext.lab.report.accuracy import accuracy_of, points
from verl_ext.lab.report.runs import Run


def test_data_sources_weigh_the_same():
    data = {"val-core/a/acc/mean@1": 0.2, "val-core/b/c/acc/mean@16": 0.6, "val-core/a/acc/best@4/mean": 1.0}
    assert accuracy_of(data) == pytest.approx(0.4)
    assert accuracy_of({"val-aux/a/acc/mean@1": 0.2}) is None


def test_the_steps_of_a_long_run_are_not_listed_at_each_of_its_steps(monkeypatch):
    """To list them takes as long as to read them once more."""
    lists = []
    monkeypatch.setattr(Run, "steps", property(lambda run: lists.append(run) or tuple(run.records)))
    found = points(Run("a", training_steps([0.5] * 50, 10)))
    assert (len(found), found[-1].seconds) == (50, 98) and len(lists) < 10
