"""``python -m recipe.reinforce_ada key=value ...`` trains."""

from verl_ext.launch import main

main("reinforce_ada")
