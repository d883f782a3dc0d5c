"""Ranks of a real size without the machine: the engine's own code on tensors that have shapes and no numbers."""
