"""Simulates any policy on a population of prompts, without verl, to estimate a method's cost and benefit.

The policy, the controller, the prompt stream and the ledger are those of training. :mod:`~verl_ext.lab.simulate.engine`
replaces generation, and :mod:`~verl_ext.lab.simulate.learning` replaces the update.
"""

from verl_ext.lab.method import Method
from verl_ext.lab.simulate.learning import LearningModel
from verl_ext.lab.simulate.run import SimulatedRun, World, simulate

__all__ = ["LearningModel", "Method", "SimulatedRun", "World", "simulate"]
