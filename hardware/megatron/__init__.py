"""The parts that Megatron needs where there is no CUDA."""
