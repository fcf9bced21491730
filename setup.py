"""Packaging: the core, and one extra per way to run it."""

from setuptools import find_packages, setup

setup(
    name="verl-ext",
    version="0.1.0",
    description="Rollout allocation for group-based RL: recipes on unmodified verl",
    packages=find_packages(include=["recipe", "recipe.*", "verl_ext", "verl_ext.*"]),
)
