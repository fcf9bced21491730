"""Simulates any policy on a population of prompts, without verl, to estimate its cost and where its rollouts go.

The policy, the controller, the prompt stream and the ledger are those of training. :mod:`~verl_ext.lab.simulate.engine`
replaces generation; an update takes its time, and leaves all success rates as they are.
"""

from verl_ext.lab.method import Method
from verl_ext.lab.simulate.run import World, simulate

__all__ = ["Method", "World", "simulate"]
