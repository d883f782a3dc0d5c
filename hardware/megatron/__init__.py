"""What Megatron needs where there is no CUDA."""
