"""The GPU memory that a model needs, and settings under which it fits: computed, not measured."""
