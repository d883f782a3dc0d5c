"""The CUDA platforms: a rule lowered to calls of torch's ``varlen_attn``."""
