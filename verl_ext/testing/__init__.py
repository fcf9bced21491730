"""The contract of a policy: checks for a user's own tests, and an engine without a model."""

from verl_ext.testing.contract import (
    CHECKS,
    check_books,
    check_budget,
    check_end_of_data,
    check_orders,
    check_repeatable,
    check_resume,
)
from verl_ext.testing.run import BrokenPromise

__all__ = [
    "CHECKS",
    "BrokenPromise",
    "check_books",
    "check_budget",
    "check_end_of_data",
    "check_orders",
    "check_repeatable",
    "check_resume",
]
