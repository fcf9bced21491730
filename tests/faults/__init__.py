"""Kills real training runs and judges their end; see ``tests/faults.sh``."""
