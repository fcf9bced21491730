"""Kills real training runs and judges what became of them; see ``tests/faults.sh``."""
