"""The NPU platforms: a rule lowered to calls of ``npu_fusion_attention``."""
