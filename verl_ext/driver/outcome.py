"""How a trajectory ended, noted beside it for the driver: masks alone do not tell it."""

from __future__ import annotations

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser

from verl_ext.trajectory import Trajectory

GENERATED, TRUNCATED, DIVERGED = "generated_tokens", "truncated", "diverged"  # in a trajectory's extra fields


def note_outcome(output: AgentLoopOutput, *, truncated: bool, diverged: bool, compact_filtering: bool) -> None:
    """Note how many tokens the policy generated and how it ended, in ``output.extra_fields``.

    With ``compact_filtering`` a truncated trajectory leaves the loss: all of its mask becomes 0. Its reward stays, and
    with it its place in the group's baseline.
    """
    output.extra_fields |= {GENERATED: sum(output.response_mask), TRUNCATED: truncated, DIVERGED: diverged}
    if truncated and compact_filtering:
        output.response_mask = [0] * len(output.response_mask)


async def has_unanswered_call(output: AgentLoopOutput, parser: ToolParser) -> bool:
    """Whether the last turn calls a tool: then a limit on the number of turns ended the trajectory, not the policy."""
    if not output.response_mask or not output.response_mask[-1]:
        return False
    # A prefix in front is masked, and no matter here: only the last turn counts.
    last_turn = Trajectory(output.response_ids, [True, *output.response_mask[1:]]).spans[-1]
    return bool((await parser.extract_tool_calls(output.response_ids[last_turn.start :], []))[1])
