"""``python -m recipe.dapo key=value ...`` trains."""

from verl_ext.launch import main

main("dapo")
