"""``python -m recipe.hora key=value ...`` trains."""

from verl_ext.launch import main

main("hora")
