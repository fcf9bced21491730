"""A Gaussian process over prompt embeddings, updated batch by batch (VIP §5.1, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.estimation.estimator import Features, Prompts, require_state

BLOCK = 2048  # prompts whose kernel with a batch is in memory at a time
MEDIAN_SAMPLE = 2048  # prompts whose pairwise distances give the bandwidth
SINGULAR = 1e-10  # squared pivot of a Cholesky factor below which a kernel matrix counts as singular
BACKGROUND = ThreadPoolExecutor(1, thread_name_prefix="gaussian_process")


class GaussianProcess:
    """g ~ GP(m, K) with K(x, x') = exp(-|x - x'|^2 / (2 h^2)); success rate = sigmoid(g).

    After a batch B with observed rates, clipped to [clip, 1 - clip] and mapped to latent values g_B, the mean becomes
    m + K(., B) K(B, B)^-1 (g_B - m_B) for all other prompts and g_B for the batch. As in the paper the kernel is
    fixed: only the mean moves. The paper keeps the (Q, Q) kernel; here K(., B) is computed for a block of prompts at a
    time, so memory is O(Q d + B^2) and time O(Q B d + B^3) per batch. Moving the mean of 17,000 prompts takes a tenth
    of a second: a thread moves the mean while the batch is trained on, and the next prediction waits for the thread.

    The paper has no observation noise. Without noise, nearly equal prompts with different observed rates tilt the
    mean far beyond the observed range; ``noise`` on the diagonal of K(B, B) limits this effect.

    Prompts with the same embedding make K(B, B) singular; then ``jitter`` is added to the diagonal, and multiplied by
    ten until the matrix can be factored. A prompt listed twice in a batch is observed once, at the mean of both rates.

    Args:
        embeddings: (Q, d).
        bandwidth: h, greater than 0; None: the median distance between prompts (of 2,048 of them where there are more).
        prior_mean: of g, so sigmoid(prior_mean) is predicted before any observation. HORA's ablation uses -1.
        clip: rates are observed no closer than this to 0 and 1; in (0, 0.5). With ``softplus``: the least variance.
        noise: variance of an observation of g, at least 0; 0 in the paper.
        link: "sigmoid" to predict success rates; "softplus" to predict reward variances (VIP Appendix E.2), which can
            exceed 1: ``PromptEstimator`` refuses "softplus" where success rates are needed.
        jitter: greater than 0.

    Raises:
        ValueError: the argument named in the message is not finite, out of range or of the wrong shape.
    """

    def __init__(
        self,
        embeddings: ArrayLike,
        *,
        bandwidth: float | None = None,
        prior_mean: float = 0.0,
        clip: float = 0.02,
        noise: float = 0.0,
        link: str = "sigmoid",
        jitter: float = 1e-8,
    ):
        self._features = Features("embeddings", embeddings)
        self._points = self._features.matrix - self._features.matrix.mean(axis=0)  # distances lose fewer digits
        self.clip = checks.positive_number("clip", clip)
        self.noise = checks.number("noise", noise, 0, np.inf)
        self.link = checks.choice("link", link, ("sigmoid", "softplus"))
        if self.link == "sigmoid" and self.clip >= 0.5:
            raise ValueError(f"clip={clip} must be less than 0.5.")
        self.jitter = checks.positive_number("jitter", jitter)
        if bandwidth is None:
            bandwidth = self._median_distance()
        self.bandwidth = checks.positive_number("bandwidth", bandwidth)
        self.prior_mean = checks.number("prior_mean", prior_mean)
        self._mean = np.full(len(self._points), self.prior_mean)
        self._moving: Future[None] | None = None

    @property
    def mean(self) -> np.ndarray:
        """(Q,) mean of g, given all observations."""
        if self._moving is not None:
            self._moving.result()
            self._moving = None
        return self._mean

    def predict(self, rows: Prompts) -> np.ndarray:
        """(B,) predicted success rates in (0, 1), or reward variances with the softplus link."""
        latent = self.mean[self._features.rows(rows)]
        return _sigmoid(latent) if self.link == "sigmoid" else np.logaddexp(0, latent)

    def observe(self, rows: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None) -> None:
        """Condition the mean on a batch. The number of rollouts behind a rate has no effect.

        Args:
            rows: (B,) prompts.
            success_rates: (B,) in [0, 1]; with the softplus link reward variances of at least 0.
            trials: accepted for :class:`~verl_ext.estimation.Estimator`.

        Raises:
            ValueError: the argument named in the message is out of range or of the wrong shape.
        """
        rows = self._features.rows(rows)
        if not rows.size:
            return
        rates = checks.vector("success_rates", success_rates, rows.size)
        checks.within("success_rates", rates, 0, 1 if self.link == "sigmoid" else np.inf)
        rows, place, times = np.unique(rows, return_inverse=True, return_counts=True)
        latent = self._latent(np.bincount(place, weights=rates) / times)
        batch = self._points[rows].astype(np.float64)
        kernel = self._kernel(batch, batch)
        np.fill_diagonal(kernel, kernel.diagonal() + self.noise / times)
        weights = _solve(kernel, latent - self.mean[rows], self.jitter)
        self._moving = BACKGROUND.submit(self._move, self._mean, rows, latent, weights)

    def _move(self, mean: np.ndarray, rows: np.ndarray, latent: np.ndarray, weights: np.ndarray) -> None:
        batch = self._points[rows].astype(np.float64)
        for begin in range(0, len(mean), BLOCK):
            block = slice(begin, begin + BLOCK)
            mean[block] += self._kernel(self._points[block].astype(np.float64), batch) @ weights
        mean[rows] = latent

    def _latent(self, rates: np.ndarray) -> np.ndarray:
        if self.link == "sigmoid":
            rates = np.clip(rates, self.clip, 1 - self.clip)
            return np.log(rates) - np.log1p(-rates)
        variances = np.maximum(rates, self.clip)
        return variances + np.log(-np.expm1(-variances))  # log(exp(v) - 1) without overflow

    def _kernel(self, points: np.ndarray, batch: np.ndarray) -> np.ndarray:
        kernel = _squared_distances(points, batch)
        kernel *= -0.5 / self.bandwidth**2
        return np.exp(kernel, out=kernel)

    def _median_distance(self) -> float:
        points = self._points
        if len(points) > MEDIAN_SAMPLE:
            points = points[np.random.default_rng(0).choice(len(points), MEDIAN_SAMPLE, replace=False)]
        points = points.astype(np.float64)
        squared = _squared_distances(points, points)[np.triu_indices(len(points), k=1)]
        median = float(np.sqrt(np.median(squared))) if squared.size else 0.0
        return median if median > 1e-6 else 1.0  # hardly any two prompts differ, so any scale will do

    def state_dict(self) -> dict[str, Any]:
        """The mean, with the number of prompts, the bandwidth and the link, which must match on loading."""
        return {"prompts": len(self._mean), "bandwidth": self.bandwidth, "link": self.link, "mean": self.mean.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: the saved estimator has another number of prompts, another bandwidth or another link.
        """
        require_state(state, prompts=len(self._mean), link=self.link)
        if not np.isclose(state["bandwidth"], self.bandwidth, rtol=1e-6):
            require_state(state, bandwidth=self.bandwidth)
        self._moving, self._mean = None, np.array(state["mean"], dtype=np.float64)


def _sigmoid(latent: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -latent))


def _squared_distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    squared = one @ (-2 * other.T)
    squared += np.einsum("ij,ij->i", one, one)[:, None]
    squared += np.einsum("ij,ij->i", other, other)
    return np.maximum(squared, 0, out=squared)


def _solve(kernel: np.ndarray, residual: np.ndarray, jitter: float) -> np.ndarray:
    """kernel^-1 residual. If the kernel is singular, adds ever more jitter to the diagonal."""
    added = 0.0
    while True:
        try:
            factor = np.linalg.cholesky(kernel + added * np.eye(len(kernel)))
            if added or np.diagonal(factor).min() ** 2 > SINGULAR:
                return np.linalg.solve(factor.T, np.linalg.solve(factor, residual))
        except np.linalg.LinAlgError:
            pass  # not positive definite: try more
        added = 10 * added if added else jitter
