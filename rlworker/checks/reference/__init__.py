"""The numbers that engines are compared with: HuggingFace in float64, and the rounding of this machine."""
