"""``python -m verl_ext.evaluation``: see :mod:`verl_ext.evaluation.run`."""

from verl_ext import extras

if __name__ == "__main__":  # worker processes of reward functions import this again
    extras.require("tools", "httpx", "pyarrow", "rich", "typer")
    import typer

    from verl_ext.evaluation.run import evaluate

    typer.run(evaluate)
