"""``python -m recipe.pods key=value ...`` trains."""

from verl_ext.launch import main

main("pods")
