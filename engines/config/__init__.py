"""Settings of the engines."""

from engines.config.actor import MegatronConfig, OptimizerConfig
from engines.config.lora import LoraConfig
from engines.config.rollout import SamplingConfig, ServedModelConfig, VllmConfig

__all__ = ["LoraConfig", "MegatronConfig", "OptimizerConfig", "SamplingConfig", "ServedModelConfig", "VllmConfig"]
