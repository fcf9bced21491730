"""Trains a real small learner with any policy, in one process and without Ray, to compare methods within minutes.

The policy, the controller, the prompt stream, the ledger and the prompt weights are those of training.
"""

from verl_ext import extras

extras.require("learn", "torch")
