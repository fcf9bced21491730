"""Data sets in the form verl reads, with the verifiers that judge them."""

from verl_ext import extras

extras.require("tools", "pebble", "pyarrow", "rich", "typer")
