"""Folders of models: found, read, checked and written."""

ADAPTER_CONFIG = "adapter_config.json"
"""File of the settings of adapters, as PEFT names it."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File of the tensors of adapters, as PEFT names it."""
