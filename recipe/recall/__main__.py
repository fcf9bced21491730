"""``python -m recipe.recall key=value ...`` trains."""

from verl_ext.launch import main

main("recall")
