"""verl on a machine without an accelerator."""
