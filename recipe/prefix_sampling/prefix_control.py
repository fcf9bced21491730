"""Length of the prefixes: one feedback controller per pass-count bucket (Prefix Sampling §2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_ext import checks
from verl_ext.policy import check_state_version


class PrefixControl:
    """The adaptive prefix controller (§2.2, eq. 2, Table 9): a ratio rho_k for each bucket k, the parents' pass count.

    Each re-rollout from a prefix of bucket k, a group of n with pass rate p, updates

        m_k <- (1 - alpha) m_k + alpha p,    m_k = target at first (App. F.2),

    If then |m_k - target| > dead_zone, and none of the last ``cooldown`` groups of the bucket moved rho_k,

        hard, k/n < target (a successful prefix helps):   rho_k <- rho_k + step sign(target - m_k)
        easy, k/n > target (a failing prefix handicaps):  rho_k <- rho_k - step sign(target - m_k)

    within the bounds. The half-life of m_k is ln 0.5 / ln(1 - alpha) groups. Assumption: a longer prefix changes the
    pass rate in the direction above.

    Target and cooldown are the paper's. The other constants are missing in our text of the paper. The initial ratio,
    alpha, the dead zone and the step are those of the authors' earlier report (the 32B run); the memory in Table 3
    implies the upper bound, and the lower bound mirrors it.

    Args:
        n: rollouts of a group.
        buckets: controlled pass counts, each in [1, n - 1] and none at the target.
        initial_ratio: first ratio of every bucket, within the bounds; a ratio is a share of the parent trajectory.
        ratio_bounds: (lower, upper), 0 < lower < upper < 1.
        target: pass rate, in (0, 1).
        ema_alpha: alpha, in (0, 1].
        dead_zone: largest |m_k - target| that moves no ratio; less than min(target, 1 - target).
        step: size of one move of a ratio, in (0, upper - lower].
        cooldown: number of groups after a move that update m_k but cannot move rho_k again.
        adaptive: False fixes the ratios (the ablation PS-fix of §4.3); m_k is still updated.

    Raises:
        ValueError: naming the argument that is not valid; the policy checks ``n``, ``buckets`` and ``target``.
    """

    VERSION = 1

    def __init__(
        self,
        n: int,
        buckets: Sequence[int],
        initial_ratio: float = 0.55,
        ratio_bounds: Sequence[float] = (0.05, 0.95),
        target: float = 0.5,
        ema_alpha: float = 0.05,
        dead_zone: float = 0.03,
        step: float = 0.05,
        cooldown: int = 5,
        adaptive: bool = True,
    ):
        self.n, self.target = n, target
        self.buckets = tuple(buckets)
        self.lower, self.upper = _bounds(ratio_bounds)
        within = checks.is_number(initial_ratio) and self.lower <= initial_ratio <= self.upper
        checks.require(
            within, "initial_ratio", initial_ratio, f"it must be within ratio_bounds=({self.lower}, {self.upper})"
        )
        checks.SHARE.check("ema_alpha", ema_alpha)
        room = min(target, 1 - target)
        reachable = checks.is_number(dead_zone) and 0 <= dead_zone < room
        checks.require(
            reachable, "dead_zone", dead_zone, f"it must be in [0, {room:g}), or pass rates could not leave it"
        )
        checks.positive_number("step", step, self.upper - self.lower)
        checks.integer_from(0).check("cooldown", cooldown)
        checks.flag("adaptive", adaptive)
        self.ema_alpha, self.dead_zone, self.step = ema_alpha, dead_zone, step
        self.cooldown, self.adaptive = cooldown, adaptive
        self._ratio = dict.fromkeys(self.buckets, float(initial_ratio))
        self._ema = dict.fromkeys(self.buckets, float(target))
        self._cooling = dict.fromkeys(self.buckets, 0)  # remaining groups that cannot move the ratio

    def ratio(self, bucket: int) -> float:
        """rho_k: the share of the parent trajectory that the next prefix holds."""
        return self._ratio[bucket]

    def observe(self, bucket: int, pass_rate: float) -> None:
        """Update m_k, and perhaps rho_k, with the pass rate of a finished re-rollout."""
        self._ema[bucket] += self.ema_alpha * (pass_rate - self._ema[bucket])
        if self._cooling[bucket]:
            self._cooling[bucket] -= 1
        elif self.adaptive and abs(self._ema[bucket] - self.target) > self.dead_zone:
            self._move(bucket)

    def metrics(self) -> dict[str, float]:
        """``ratio_k*`` and ``pass_rate_ema_k*`` of every controlled bucket."""
        values = {f"ratio_k{bucket}": self._ratio[bucket] for bucket in self.buckets}
        return values | {f"pass_rate_ema_k{bucket}": self._ema[bucket] for bucket in self.buckets}

    def state_dict(self) -> dict:
        """JSON-able form; :meth:`load_state_dict` is the inverse."""
        return {
            "version": self.VERSION,
            "n": self.n,
            "buckets": list(self.buckets),
            "ratio": list(self._ratio.values()),
            "ema": list(self._ema.values()),
            "cooling": list(self._cooling.values()),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Inverse of :meth:`state_dict`; fixed ratios stay at ``initial_ratio``.

        Raises:
            ValueError: the state has another version or other buckets.
        """
        check_state_version(state, self.VERSION, "PrefixControl")
        same = state["n"] == self.n and tuple(state["buckets"]) == self.buckets
        saved = f"the run that is resumed has {state['buckets']} of n={state['n']}"
        checks.require(same, "buckets", list(self.buckets), saved)
        if self.adaptive:  # the bounds may be narrower than those of the saved run
            ratios = (min(max(float(ratio), self.lower), self.upper) for ratio in state["ratio"])
            self._ratio = dict(zip(self.buckets, ratios, strict=True))
        self._ema = dict(zip(self.buckets, map(float, state["ema"]), strict=True))
        self._cooling = dict(zip(self.buckets, map(int, state["cooling"]), strict=True))

    def _move(self, bucket: int) -> None:
        """Move the ratio one step toward the target, clipped to its bounds. A change starts the cooldown."""
        too_low, hard = self._ema[bucket] < self.target, bucket / self.n < self.target
        moved = self._ratio[bucket] + (self.step if too_low == hard else -self.step)
        moved = min(max(moved, self.lower), self.upper)
        if moved != self._ratio[bucket]:
            self._ratio[bucket] = moved
            self._cooling[bucket] = self.cooldown


def _bounds(bounds: Sequence[float]) -> tuple[float, float]:
    pair = isinstance(bounds, Sequence) and len(bounds) == 2 and all(map(checks.is_number, bounds))
    # A prefix of ratio 0 is none, and a prefix of ratio 1 leaves nothing to generate.
    valid = pair and 0 < bounds[0] < bounds[1] < 1
    checks.require(valid, "ratio_bounds", bounds, "it must be (lower, upper) with 0 < lower < upper < 1")
    return float(bounds[0]), float(bounds[1])
