"""What an optimizer step did to the objective."""

from .forward import ProbeBatch, noise_like, predict, squared_errors, undisturbed, unwrapped
from .look_ahead import ESTIMATORS, Credit, LookAhead, make_estimator
from .queue import DeltaQueue
from .selection import SELECTORS, f_statistic_selector, stratified_timesteps
from .step_watch import StepWatch, gradients_are_gone, gradients_are_synchronised

__all__ = [
    "ESTIMATORS",
    "SELECTORS",
    "Credit",
    "DeltaQueue",
    "LookAhead",
    "ProbeBatch",
    "StepWatch",
    "f_statistic_selector",
    "gradients_are_gone",
    "gradients_are_synchronised",
    "make_estimator",
    "noise_like",
    "predict",
    "squared_errors",
    "stratified_timesteps",
    "undisturbed",
    "unwrapped",
]
