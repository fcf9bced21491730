"""Estimators: predictors of each prompt's success rate. Pure numpy: no verl, torch or ray.

:mod:`verl_ext.estimation.embeddings` (sentence-transformers) and :mod:`verl_ext.estimation.probe` (torch) need more
than numpy, so callers import these modules themselves.
"""

from verl_ext.estimation.beta_posterior import BetaPosterior
from verl_ext.estimation.estimator import Estimator
from verl_ext.estimation.gaussian_process import GaussianProcess
from verl_ext.estimation.history import History
from verl_ext.estimation.moving_average import MovingAverage
from verl_ext.estimation.ridge_regression import RidgeRegression

__all__ = ["BetaPosterior", "Estimator", "GaussianProcess", "History", "MovingAverage", "RidgeRegression"]
