"""``python -m recipe.prefix_sampling key=value ...`` trains."""

from verl_ext.launch import main

main("prefix_sampling")
