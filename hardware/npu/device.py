"""A training process takes its NPU."""

import torch

from hardware.megatron import shims
from hardware.npu import mindspeed


def init_process() -> torch.device:
    """Take the process's one NPU, and prepare Megatron for it.

    Raises:
        RuntimeError: torch_npu cannot be imported, or the process does not see exactly one NPU.
    """
    try:
        import torch_npu  # pyright: ignore[reportMissingImports]  there on machines with an NPU alone
    except ImportError as error:
        raise RuntimeError(
            f"platform: 'npu' needs torch_npu and CANN in every training process, and importing it said: {error}; "
            "install requirements/npu.txt and source CANN's set_env.sh, or take 'npu-emulated', which runs the "
            "same code on a CPU"
        ) from error
    if (devices := torch_npu.npu.device_count()) != 1:
        raise RuntimeError(
            f"platform: a training process must see exactly one NPU, its own, and sees {devices}; unset "
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES where Ray is started"
        )
    mindspeed.patch_megatron()
    torch_npu.npu.set_device(0)
    shims.install(
        shims.Runtime(
            "npu",
            torch_npu.npu.current_device,
            torch_npu.npu.synchronize,
            torch_npu.npu.get_rng_state,
            torch_npu.npu.set_rng_state,
            torch_npu.npu.manual_seed,
        )
    )
    return torch.device("npu", 0)
