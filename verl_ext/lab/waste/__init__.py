"""Analyses logged rollouts, without verl: how many gave a gradient, and how other methods would have spent them.

verl-ext waste outputs/rollouts --out outputs/waste
"""
