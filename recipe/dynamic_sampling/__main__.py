"""``python -m recipe.dynamic_sampling key=value ...`` trains."""

from verl_ext.launch import main

main("dynamic_sampling")
