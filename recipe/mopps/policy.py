"""MoPPS: choose prompts whose success rate is probably near a half, by a Beta posterior for each prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from recipe.grpo.policy import Uniform
from verl_ext import checks
from verl_ext.policy import Action, Draw, Group, Panel, Prompt, oversampled


class Mopps(Uniform):
    """GRPO on B of s·B drawn prompts: those with sampled success rates closest to ``band``.

    The posterior of a prompt is Beta(α, β), at first Beta(α0, β0). A group with k successes among n rollouts changes it
    to α ← λα + (1-λ)α0 + k and β ← λβ + (1-λ)β0 + n - k, so old outcomes are forgotten with λ < 1. The choice uses
    samples of these posteriors and not their means (Thompson sampling), to explore prompts of which little is known.

    Source: Qu et al., "Can Prompt Difficulty be Online Predicted for Accelerating RL Finetuning of Reasoning Models?"
    (arXiv 2507.04632), and the authors' release.

    Args:
        train_batch_size: prompts per training step (B).
        n: rollouts per chosen prompt.
        s: candidates of a step, in units of B (rounded up).
        band: (lowest, highest) wanted success rate. Among prompts with sampled rates within the band, the choice is
            random.
        decay: λ, the weight of the previous posterior; 1 forgets nothing.
        alpha0: α of the prior.
        beta0: β of the prior.
        seed: of the posterior samples.
        prompt_weight: see :class:`~verl_ext.policy.RolloutPolicy`.
    """

    panels = (
        Panel(
            name="mopps_prediction",
            pattern=r"mopps/(success_rate|predicted)",
            title="MoPPS: predicted and observed success rates",
            caption="Means over the trained prompts: posterior before the step, and share of correct rollouts.",
            unit="success rate",
        ),
    )

    @classmethod
    def settings_for(cls, train_batch_size: int, n: int, seed: int) -> dict[str, Any]:
        return {"n": n, "seed": seed}

    def __init__(
        self,
        *,
        train_batch_size: int,
        n: int,
        s: float = 8,
        band: Sequence[float] = (0.5, 0.5),
        decay: float = 0.5,
        alpha0: float = 1.0,
        beta0: float = 1.0,
        seed: int = 0,
        prompt_weight: str = "equal",
    ):
        super().__init__(train_batch_size=train_batch_size, n=n, prompt_weight=prompt_weight)
        checks.number("s", s, 1)
        pair = isinstance(band, Sequence) and len(band) == 2 and all(map(checks.RATE.accepts, band))
        valid = "use [lowest, highest], success rates in [0, 1] in this order"
        checks.require(pair and band[0] <= band[1], "band", band, valid)
        checks.RATE.check("decay", decay)
        self.prior = checks.positive_number("alpha0", alpha0, 1e12), checks.positive_number("beta0", beta0, 1e12)
        checks.integer_from(0).check("seed", seed)
        self.candidates = oversampled(s, train_batch_size)
        self.lowest, self.highest = band
        self.decay = decay
        self.rng = np.random.default_rng(seed)
        self.posterior: dict[str, tuple[float, float]] = {}  # alpha and beta by prompt id
        self._rates: list[tuple[float, float]] = []  # predicted and observed, of this step's groups

    def start_step(self, step: int, draw: Draw) -> list[Action]:
        self._rates, self._unfiltered = [], draw
        return super().start_step(step, self._draw_chosen)

    def on_group(self, group: Group) -> list[Action]:
        if group.usable:
            self._observe(group)
        return super().on_group(group)

    def _draw_chosen(self, count: int, but: Collection[str] = ()) -> list[Prompt]:
        """The ``count`` candidates with sampled success rates closest to the band; the others are not generated."""
        candidates = self._unfiltered(self.candidates, but)
        if len(candidates) <= count:
            return candidates
        alpha, beta = np.array([self.posterior.get(prompt.id, self.prior) for prompt in candidates]).T
        sampled = self.rng.beta(alpha, beta)
        distance = np.maximum(np.maximum(self.lowest - sampled, sampled - self.highest), 0)
        order = self.rng.permutation(len(candidates))
        nearest = order[np.argsort(distance[order], kind="stable")[:count]]
        return [candidates[index] for index in sorted(nearest.tolist())]

    def _observe(self, group: Group) -> None:
        observed, rollouts = group.success_rate, len(group.usable)
        alpha, beta = self.posterior.get(group.prompt.id, self.prior)
        self._rates.append((alpha / (alpha + beta), observed))
        alpha0, beta0 = self.prior
        self.posterior[group.prompt.id] = (
            self.decay * alpha + (1 - self.decay) * alpha0 + observed * rollouts,
            self.decay * beta + (1 - self.decay) * beta0 + (1 - observed) * rollouts,
        )

    def metrics(self) -> dict[str, float]:
        predicted, observed = np.array(self._rates).reshape(-1, 2).mean(axis=0) if self._rates else (0.0, 0.0)
        error = float(np.mean([abs(before - after) for before, after in self._rates])) if self._rates else 0.0
        return {
            "mopps/predicted": float(predicted),
            "mopps/success_rate": float(observed),
            "mopps/mae": error,
            "mopps/prompts_known": float(len(self.posterior)),
        }

    def state_dict(self) -> dict:
        posterior = {prompt: list(counts) for prompt, counts in self.posterior.items()}
        return super().state_dict() | {"posterior": posterior, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self.posterior = {prompt: (alpha, beta) for prompt, (alpha, beta) in state["posterior"].items()}
        self.rng.bit_generator.state = state["rng"]
