"""``npu_fusion_attention`` on a CPU, with its documented contract."""
