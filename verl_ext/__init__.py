"""Rollout allocation for group-based RL on unmodified verl."""

__version__ = "0.1.0"
