"""Trains recipes with options of verl that change the number of processes or the update; see ``tests/matrix.sh``."""
