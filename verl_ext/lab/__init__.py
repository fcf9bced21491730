"""The lab: decide before spending. A small learner, simulation, waste of logged rollouts, report of runs."""

from verl_ext import extras

extras.require("tools", "hydra", "jinja2", "matplotlib", "orjson", "rich", "typer")
