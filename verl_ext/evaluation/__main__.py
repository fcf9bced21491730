"""``verl-ext evaluate``: see :mod:`verl_ext.evaluation.command`."""

from verl_ext import extras

if __name__ == "__main__":
    extras.require("tools", "filelock", "matplotlib", "pyarrow", "rich", "typer")
    from verl_ext.evaluation.command import app

    app()
