"""``python -m verl_ext ...`` is ``verl-ext ...``."""

from verl_ext.cli import main

if __name__ == "__main__":  # processes that are spawned import this module again
    main()
