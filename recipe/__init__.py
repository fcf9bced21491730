"""One package per method: a policy, its config, and what to type."""
