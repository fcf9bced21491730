"""The replay buffer with a policy, a controller and an engine of the test's choice."""

from __future__ import annotations

from support.engine import epochs, prompts
from verl_ext.controller import RolloutController
from verl_ext.driver.replay_buffer import GroupReplayBuffer
from verl_ext.policy import Request, RolloutPolicy


def make_buffer(policy, writer, *, drain=True, stall_timeout=30.0, steps=5, **settings) -> GroupReplayBuffer:
    """A buffer of a run of ``steps`` steps over 40 prompts, whose rollouts ``writer`` writes into the running queue."""
    policy.start_run(steps, [])
    buffer = GroupReplayBuffer(
        poll_interval=0.01,
        stall_timeout=stall_timeout,
        drain=drain,
        trainer_mode="policy_sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        **settings,
    )
    buffer.controller = RolloutController(policy, epochs(prompts(40)), 40, writer)
    writer.buffer = buffer
    return buffer


def begin(buffer: GroupReplayBuffer, step: int = 1) -> None:
    """The start of a step, as the trainer does it."""
    buffer._sync_metadata_from_transfer_queue()
    buffer.controller.begin_step(step)


class Scripted(RolloutPolicy):
    """Opens the given requests at every step, and trains on complete groups as soon as there are ``groups``."""

    def __init__(self, *requests, groups=1):
        self.requests, self.groups, self.ready = requests, groups, []

    def start_step(self, step, draw):
        prompts = draw(len(self.requests))
        return [Request(prompt, *request) for prompt, request in zip(prompts, self.requests, strict=True)]

    def on_group(self, group):
        self.ready.append(group)
        return []

    def take_batch(self):
        if len(self.ready) < self.groups:
            return []
        batch, self.ready = self.ready, []
        return batch
