"""``python -m recipe.pilot_commit key=value ...`` trains."""

from verl_ext.launch import main

main("pilot_commit")
