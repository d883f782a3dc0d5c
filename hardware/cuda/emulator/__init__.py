"""``varlen_attn`` on a CPU: torch's own function over kernels that check and compute."""
