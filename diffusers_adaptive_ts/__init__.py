"""Timestep samplers and loss weightings for training diffusion models with diffusers."""

from .objective import DiffusionObjective
from .samplers import (
    AdaptiveTimestepSampler,
    BetaSampler,
    CurriculumSampler,
    EDMLogNormalSampler,
    EntropyRateSampler,
    GradientVarianceSampler,
    HistogramSampler,
    LaplaceSampler,
    LearningProgressSampler,
    LogitNormalSampler,
    LossSecondMomentSampler,
    ModeSampler,
    SpeeDSampler,
    StratifiedSampler,
    TimestepBiasSampler,
    TimestepSampler,
    UniformSampler,
    list_samplers,
    make_sampler,
    register_sampler,
    sampler_options,
)
from .weightings import Weighting, list_weightings, make_weighting, register_weighting

__version__ = "0.1.0"

__all__ = [
    "AdaptiveTimestepSampler",
    "BetaSampler",
    "CurriculumSampler",
    "DiffusionObjective",
    "EDMLogNormalSampler",
    "EntropyRateSampler",
    "GradientVarianceSampler",
    "HistogramSampler",
    "LaplaceSampler",
    "LearningProgressSampler",
    "LogitNormalSampler",
    "LossSecondMomentSampler",
    "ModeSampler",
    "SpeeDSampler",
    "StratifiedSampler",
    "TimestepBiasSampler",
    "TimestepSampler",
    "UniformSampler",
    "Weighting",
    "list_samplers",
    "list_weightings",
    "make_sampler",
    "make_weighting",
    "register_sampler",
    "register_weighting",
    "sampler_options",
]
