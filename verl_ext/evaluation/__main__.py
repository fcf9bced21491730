"""``python -m verl_ext.evaluation``: see :mod:`verl_ext.evaluation.run`."""

import typer

from verl_ext.evaluation.run import evaluate

if __name__ == "__main__":  # worker processes of reward functions import this again
    typer.run(evaluate)
