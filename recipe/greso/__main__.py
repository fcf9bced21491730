"""``python -m recipe.greso key=value ...`` trains."""

from verl_ext.launch import main

main("greso")
