"""What the options mean."""

from __future__ import annotations

from verl_ext.evaluation import settings


def test_ks_are_powers_of_two_and_n():
    assert settings.parse_ks(None, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert settings.parse_ks(None, 6) == [1, 2, 4, 6]
    assert settings.parse_ks("4 1, 2,2", 6) == [1, 2, 4]
