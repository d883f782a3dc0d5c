"""Settings of the engines."""

from engines.config.actor import MegatronConfig, OptimizerConfig
from engines.config.rollout import SamplingConfig, VllmConfig

__all__ = ["MegatronConfig", "OptimizerConfig", "SamplingConfig", "VllmConfig"]
