"""Any estimator with any allocation rule, by name, over the prompts of a run: what policies are put together from."""
