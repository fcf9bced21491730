from __future__ import annotations

import asyncio

import pytest
from support.agent_loops import END, make_tokenizer, sql_call
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser

from verl_ext.driver.agent_loop import has_unanswered_call, note_ending

CALL = sql_call("SELECT 1")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def output_of(tokenizer, *pieces: tuple[str, int]) -> AgentLoopOutput:
    """A response of pieces of text, each with its mask."""
    tokens = [(token, mask) for text, mask in pieces for token in tokenizer.encode(text, add_special_tokens=False)]
    return AgentLoopOutput(
        prompt_ids=[1],
        response_ids=[token for token, _ in tokens],
        response_mask=[mask for _, mask in tokens],
        metrics=AgentLoopMetrics(),
    )


@pytest.mark.parametrize("compact_filtering", [True, False])
@pytest.mark.parametrize("truncated", [True, False])
def test_what_was_generated_is_known_even_where_the_mask_no_longer_says_it(tokenizer, truncated, compact_filtering):
    output = output_of(tokenizer, ("abc", 1), ("observed", 0), ("de", 1))
    note_ending(output, truncated=truncated, compact_filtering=compact_filtering)
    assert output.extra_fields == {"generated_tokens": 5, "truncated": truncated}
    assert sum(output.response_mask) == (0 if truncated and compact_filtering else 5)
    assert len(output.response_mask) == len(output.response_ids)


@pytest.mark.parametrize(
    ("pieces", "unanswered"),
    [
        ([(CALL + END, 1), ("7", 0), ("the answer is 7" + END, 1)], False),
        ([(CALL + END, 1), ("7", 0), (CALL + END, 1)], True),
        ([(CALL + END, 1)], True),
        ([(CALL + END, 1), ("7", 0)], False),  # the answer came
        ([(CALL + END, 0), ("7", 0), (CALL + END, 1)], True),  # after an interaction of the prefix
        ([(CALL + END, 0), ("7", 0), ("7" + END, 1)], False),
        ([], False),
    ],
)
def test_a_call_without_an_answer_was_cut_off(tokenizer, pieces, unanswered):
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    assert asyncio.run(has_unanswered_call(output_of(tokenizer, *pieces), parser)) == unanswered
