"""``python -m recipe.knapsack key=value ...`` trains."""

from verl_ext.launch import main

main("knapsack")
