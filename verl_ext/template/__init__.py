"""The files that ``verl-ext new`` writes. Their names end in ``.txt``, because they are no modules of this package."""
