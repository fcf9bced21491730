"""Data sets in the form verl reads, with the verifiers that judge them."""
