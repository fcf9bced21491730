"""Hydra configuration that all recipes share, on top of verl's ``ppo_trainer``."""
