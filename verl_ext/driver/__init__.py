"""verl's V1 trainers, driven by a rollout policy. The only package that imports verl."""
