"""``python -m recipe.vip key=value ...`` trains."""

from verl_ext.launch import main

main("vip")
