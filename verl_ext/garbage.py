"""Python's garbage collector, out of the way of imports."""

from __future__ import annotations

import gc

THRESHOLDS = (100_000, 20, 20)  # CPython's are (700, 10, 10)


def collect_rarely() -> None:
    """Look for cycles after 100,000 new objects instead of 700.

    Importing torch, transformers, verl and vLLM makes millions of objects that stay; to look through them again and
    again takes a quarter of that time (``import verl_ext.driver.runner``: 8.0 s, and 6.1 s with these thresholds; two
    cores of an AMD EPYC, one run each), and a run on the CPU starts eight such processes. What is in no cycle is freed
    at once, as ever.
    """
    gc.set_threshold(*THRESHOLDS)
