"""Learned priors of HORA's ablation: a linear probe over prompt features (HORA Appendix F). Needs torch."""

from __future__ import annotations

import base64
import io
import pickle
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks, extras
from verl_ext.estimation.estimator import Features, Prompts, observed, require_state

if TYPE_CHECKING:
    import torch

STRENGTH = 2.0  # of a probe with one head: with rate 0.5 this is the uniform prior
LEAST_STRENGTH, MOST_STRENGTH = 0.25, 16.0


class LinearProbe:
    """LayerNorm, then one or two linear heads on frozen features: a success rate, and its strength in rollouts.

    One head is trained on the binomial loss -c log p - (n - c) log(1 - p). Two heads add a strength s = softplus(.),
    clamped to [0.25, 16], and are trained on the Beta-binomial loss -log B(c + s p, n - c + s (1 - p)) / B(s p, s (1 -
    p)). :func:`verl_ext.allocation.hit_utility.prior_from_prediction` makes a prior of the output (eq. 14).

    ``online``: each :meth:`observe` is one cycle. The probe keeps the last ``cycles`` cycles and takes ``steps`` Adam
    steps on them; the cycle t cycles ago has weight ``decay``^t. Predictions use a moving average of the weights, which
    starts from the fitted weights, or from the weights after the first cycle if the probe was not fitted. If not
    online, only :meth:`fit` changes the weights.

    Args:
        features: (Q, d) embeddings or hidden states.
        online: learn from observations.
        dual: two heads.
        cycles: latest cycles that each Adam step uses.
        steps: Adam steps per observation.
        learning_rate: of Adam.
        weight_decay: of Adam.
        decay: weight of an observation one cycle older; in (0, 1].
        average: decay of the moving average of the weights; in [0, 1).

    Raises:
        ValueError: the argument named in the message is not finite, out of range or of the wrong shape.
    """

    def __init__(
        self,
        features: ArrayLike,
        *,
        online: bool = True,
        dual: bool = False,
        cycles: int = 10,
        steps: int = 5,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-2,
        decay: float = 0.97,
        average: float = 0.99,
    ):
        extras.require("embeddings", "torch")
        import torch

        self._features = Features("features", features)
        self.online, self.dual = online, dual
        self.cycles, self.steps = checks.integer("cycles", cycles, 1), checks.integer("steps", steps, 1)
        self.decay = checks.number("decay", decay, 1e-9, 1)
        self.average = checks.number("average", average, 0, 1 - 1e-9)
        self._inputs = torch.as_tensor(self._features.matrix, dtype=torch.float32)
        width = self._inputs.shape[1]
        self._model = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 if dual else 1))
        with torch.no_grad():
            self._model[1].weight.zero_()
            self._model[1].bias.zero_()
            if dual:
                self._model[1].bias[1] = float(np.log(np.expm1(STRENGTH)))
        self._adam = {
            "lr": checks.positive_number("learning_rate", learning_rate),
            "weight_decay": checks.number("weight_decay", weight_decay, 0, np.inf),
        }
        self._optimizer = torch.optim.Adam(self._model.parameters(), **self._adam)
        self._averaged = torch.optim.swa_utils.AveragedModel(
            self._model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(self.average)
        )
        self._cycles: deque[tuple[list[int], list[float], list[int]]] = deque(maxlen=self.cycles)

    def predict(self, prompts: Prompts) -> np.ndarray:
        """(B,) success rates in (0, 1)."""
        return self.predict_prior(prompts)[0]

    def predict_prior(self, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
        """(rates, strengths), each (B,): arguments of ``hit_utility.prior_from_prediction``."""
        import torch

        with torch.no_grad():
            rate, strength = self._outputs(self._averaged, torch.as_tensor(self._features.rows(prompts)))
        return rate.double().numpy(), strength.double().numpy()

    def observe(self, prompts: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None) -> None:
        """Add one generation cycle; with ``online``, take ``steps`` Adam steps on the last ``cycles`` cycles.

        Raises:
            ValueError: the argument named in the message is out of range or of the wrong shape.
        """
        rows = self._features.rows(prompts)
        rates, trials = observed(success_rates, trials, rows.size)
        if not self.online:
            return
        self._cycles.append((rows.tolist(), rates.tolist(), trials.tolist()))
        for _ in range(self.steps):
            self._step(list(self._cycles))
        self._averaged.update_parameters(self._model)

    def fit(
        self, prompts: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None, *, steps: int = 500
    ) -> None:
        """Pretrain on held-out rollouts, all rollouts in every step. The moving average becomes the final weights.

        Raises:
            ValueError: the argument named in the message is out of range or of the wrong shape.
        """
        import torch

        rows = self._features.rows(prompts)
        rates, trials = observed(success_rates, trials, rows.size)
        for _ in range(checks.integer("steps", steps, 1)):
            self._step([(rows.tolist(), rates.tolist(), trials.tolist())])
        self._averaged.module.load_state_dict(self._model.state_dict())
        self._averaged.n_averaged.fill_(1)  # at 0, the first update would replace the fitted weights
        # Near an optimum Adam's second moments are tiny, and the first steps on new rollouts would be too long.
        self._optimizer = torch.optim.Adam(self._model.parameters(), **self._adam)

    def _outputs(self, model: torch.nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        output = model(self._inputs[rows])
        rate = torch.sigmoid(output[:, 0]).clamp(1e-6, 1 - 1e-6)
        if not self.dual:
            return rate, torch.full_like(rate, STRENGTH)
        return rate, torch.nn.functional.softplus(output[:, 1]).clamp(LEAST_STRENGTH, MOST_STRENGTH)

    def _step(self, cycles: list[tuple[list[int], list[float], list[int]]]) -> None:
        import torch

        newest = len(cycles) - 1
        weight = torch.tensor(
            [self.decay ** (newest - cycle) for cycle, (rows, _, _) in enumerate(cycles) for _ in rows]
        )
        rows, rates, trials = (
            torch.tensor([entry for cycle in cycles for entry in cycle[column]]) for column in range(3)
        )
        rate, strength = self._outputs(self._model, rows)
        hits = rates * trials
        misses = trials - hits
        if self.dual:
            a, b = strength * rate, strength * (1 - rate)
            loss = _log_beta(a, b) - _log_beta(a + hits, b + misses)
        else:
            loss = -hits * torch.log(rate) - misses * torch.log1p(-rate)
        self._optimizer.zero_grad()
        ((weight * loss).sum() / weight.sum()).backward()
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and the kept cycles; tensors as base64 text."""
        tensors = {
            "model": self._model.state_dict(),
            "averaged": self._averaged.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        return {
            "width": self._inputs.shape[1],
            "dual": self.dual,
            "tensors": _to_text(tensors),
            "replay": [list(cycle) for cycle in self._cycles],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``. Learning rate and weight decay stay those of this probe.

        Raises:
            ValueError: the saved probe has other features, another number of heads or weights that are not finite, or
                this is no probe's state.
        """
        require_state(state, width=self._inputs.shape[1], dual=self.dual)
        try:
            tensors = _from_text(state["tensors"])
            self._model.load_state_dict(tensors["model"])
            self._averaged.load_state_dict(tensors["averaged"])
            self._optimizer.load_state_dict(tensors["optimizer"])
        except (KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"the state's tensors are not those of a probe: {error}.") from error
        if not all(weights.isfinite().all() for weights in self._averaged.parameters()):
            raise ValueError("the state's weights are not finite: the saved probe has diverged.")
        for group in self._optimizer.param_groups:
            group.update(self._adam)
        self._cycles = deque((tuple(cycle) for cycle in state["replay"]), maxlen=self.cycles)


def _log_beta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _to_text(tensors: dict[str, Any]) -> str:
    import torch

    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _from_text(text: str) -> dict[str, Any]:
    import torch

    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
