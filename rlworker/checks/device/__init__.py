"""Checks of one device, in one process, that need torch, megatron-core and transformers alone."""
