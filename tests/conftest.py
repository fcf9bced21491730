"""The stack under test is the CPU's; verl reads that from the environment when it is imported."""

from verl_ext.launch import export_environment

export_environment("cpu")
