"""Any policy on a population of prompts, without verl: what a method would cost, and what it would bring.

The policy, the controller, the prompt stream and the books are those of training; :mod:`~verl_ext.lab.simulate.run`
puts drawn outcomes in place of generation, and :mod:`~verl_ext.lab.simulate.learning` in place of the update.
"""

from verl_ext.lab.method import Method
from verl_ext.lab.simulate.learning import LearningModel
from verl_ext.lab.simulate.run import Simulated, World, simulate

__all__ = ["LearningModel", "Method", "Simulated", "World", "simulate"]
