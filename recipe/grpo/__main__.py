"""``python -m recipe.grpo key=value ...`` trains."""

from verl_ext.launch import main

main("grpo")
