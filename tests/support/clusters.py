"""Inputs of the size computation, drawn by hypothesis: model, bytes of a GPU, GPUs, tokens of the longest sequence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_ext.hardware.shapes import SHAPES

given_a_cluster = given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(24e9, 300e9),
    st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 64, 256]),
    st.integers(1, 140_000),
)
