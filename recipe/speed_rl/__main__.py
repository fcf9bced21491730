"""``python -m recipe.speed_rl key=value ...`` trains."""

from verl_ext.launch import main

main("speed_rl")
