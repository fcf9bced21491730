"""What works on a machine or cluster: checks of its nodes, then every recipe trained for a few steps in every mode."""
