"""Uniform rollouts until the model has learned the format (HORA Appendix C)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl_ext import checks
from verl_ext.errors import BadReward
from verl_ext.policy import Rollout


class WarmUp:
    """Ends once the mean of a reward component was at least ``threshold`` in ``cycles`` consecutive steps.

    Args:
        component: name of a number that the reward function returns beside the score; None: there is no warm-up.
        threshold: finite number.
        cycles: at least 1.
    """

    def __init__(self, component: str | None, threshold: float, cycles: int):
        named = component is None or (isinstance(component, str) and bool(component))
        checks.require(
            named, "warm_up_component", component, "use the name of an entry of the reward function's result, or null"
        )
        checks.number("warm_up_threshold", threshold)
        checks.COUNT.check("warm_up_cycles", cycles)
        self.component, self.threshold, self.cycles = component, threshold, cycles
        self.over = component is None
        self._in_a_row = 0

    def see(self, rollouts: list[Rollout]) -> None:
        """Compare the component's mean over the rollouts of a step with the threshold. A missing value counts as 0.

        Raises:
            BadReward: the reward function reports the component for no rollout.
        """
        if self.over:
            return
        reported = {name for rollout in rollouts for name in rollout.components}
        if self.component not in reported:
            found = ", ".join(sorted(reported)) or "none"
            raise BadReward(
                f"rollout_policy.warm_up_component={self.component!r} is not valid: the reward function reports {found}"
            )
        # An agent that took too long has no reward components: it has not shown the format.
        values = [rollout.components.get(self.component, 0.0) for rollout in rollouts]
        self._in_a_row = self._in_a_row + 1 if np.mean(values) >= self.threshold else 0
        self.over = self._in_a_row >= self.cycles

    def state_dict(self) -> dict:
        return {"over": self.over, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping) -> None:
        self.over, self._in_a_row = self.component is None or bool(state["over"]), int(state["in_a_row"])
