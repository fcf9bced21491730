"""Trains a real small learner with any policy, in one process and without Ray: what a method is worth, in a minute.

The policy, the controller, the prompt stream, the ledger and the prompt weights are those of training.
"""

from verl_ext import extras

extras.require("learn", "torch")
