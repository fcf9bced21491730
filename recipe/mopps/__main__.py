"""``python -m recipe.mopps key=value ...`` trains."""

from verl_ext.launch import main

main("mopps")
