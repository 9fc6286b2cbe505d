"""Which timestep is drawn."""

from .adaptive import AdaptiveTimestepSampler
from .base import TimestepSampler, list_samplers, make_sampler, register_sampler, sampler_class, sampler_options
from .gradient_variance import GradientVarianceSampler
from .learning_progress import LearningProgressSampler
from .loss_aware import EntropyRateSampler, LossSecondMomentSampler
from .speed import SpeeDSampler
from .static import (
    BetaSampler,
    CurriculumSampler,
    EDMLogNormalSampler,
    HistogramSampler,
    LaplaceSampler,
    LogitNormalSampler,
    ModeSampler,
    StratifiedSampler,
    TimestepBiasSampler,
    UniformSampler,
)

__all__ = [
    "AdaptiveTimestepSampler",
    "BetaSampler",
    "CurriculumSampler",
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
    "list_samplers",
    "make_sampler",
    "register_sampler",
    "sampler_class",
    "sampler_options",
]
