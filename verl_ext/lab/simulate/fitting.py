"""The learning model's parameters from a recorded learning curve."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_ext.lab.report.runs import Run
from verl_ext.lab.report.summary import accuracy_against
from verl_ext.lab.simulate.learning import LearningModel
from verl_ext.lab.simulate.population import sigmoid

LOGGED = ("groups/reward_std_mean", "groups/effective_ratio", "groups/in_batch", "allocation/mean")


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        learning: the model with its shared component fitted.
        offset: logits by which the validation set is easier than the population, at step 0.
        error: root mean square of accuracy, predicted minus recorded.
        validations: how many there were.
    """

    learning: LearningModel
    offset: float
    error: float
    validations: int


def fit_shared(run: Run, logits: np.ndarray, learning: LearningModel) -> Fit:
    """Fit ``shared``, and how hard the validation set is, to the accuracies that a run logged.

    The signal of each step is taken from the log, not simulated: G_t = ``groups/reward_std_mean`` and V_t =
    ``groups/effective_ratio`` / (``groups/in_batch`` · ``allocation/mean``), so advantages are GRPO's, prompts weigh
    the same, and groups are about equally large. With s_t = sum over steps up to t of ``learning.shared_gain(G, V)``
    per unit of shared,

        minimise over shared >= 0, offset:  sum_t (mean_i sigmoid(logit_i + offset + shared s_t) - accuracy_t)^2.

    One curve cannot tell ``noise`` from ``shared``, nor what training does to the prompts trained: those stay as given.

    Args:
        run: read by :func:`verl_ext.lab.report.runs.read_run`.
        logits: (Q,) of the population before training.
        learning: where the other parameters come from.

    Raises:
        ValueError: too few validations, or no signal logged.
    """
    from scipy.optimize import least_squares

    steps, accuracies = accuracy_against(run, "step")
    missing = [name for name in LOGGED if name not in run.metrics()]
    if missing or accuracies.size < 3:
        raise ValueError(
            f"fit={run.name}: needs {', '.join(LOGGED)} and at least 3 validations with val-core/*/acc/mean@*; it has "
            f"{accuracies.size} validations and lacks {', '.join(missing) or 'nothing else'}."
        )
    trained, signal = run.series(LOGGED[0])
    effective, prompts, rollouts = (run.series(name)[1] for name in LOGGED[1:])
    unit = replace(learning, shared=1.0)
    gains = [unit.shared_gain(*step) for step in zip(signal, effective / (prompts * rollouts), strict=True)]
    lifted = np.array([sum(gain for at, gain in zip(trained, gains, strict=True) if at <= step) for step in steps])

    def predicted(parameters: np.ndarray) -> np.ndarray:
        shared, offset = parameters
        return np.array([sigmoid(logits + offset + shared * lift).mean() for lift in lifted])

    found = least_squares(lambda x: predicted(x) - accuracies, x0=[0.01, 0.0], bounds=([0, -np.inf], np.inf))
    error = float(np.sqrt(np.mean(found.fun**2)))
    return Fit(replace(learning, shared=float(found.x[0])), float(found.x[1]), error, accuracies.size)
