"""A training process takes its GPU, which is checked before a model is built on it."""

import inspect

import torch

from hardware.megatron import shims

LEAST_CAPABILITY = (8, 0)
"""Least compute capability for the flash kernels (ATen's ``flash_api.cpp``)."""


def init_process() -> torch.device:
    """Take the process's one GPU, and prepare Megatron for it; the errors are those of ``check_device``."""
    check_device()
    torch.cuda.set_device(0)
    torch.backends.cudnn.allow_tf32 = False  # its default rounds fp32, in which images enter a tower, to 10 bits
    shims.install(None)
    return torch.device("cuda", 0)


def check_device() -> None:
    """Check that this process sees exactly one GPU, and that the GPU and torch have the needed kernels.

    Raises:
        RuntimeError: torch lacks CUDA or a kernel, the driver does not start, or the process does not see exactly one
            GPU that is new enough.
    """
    if torch.version.cuda is None:
        raise RuntimeError(
            f"platform: 'cuda' needs a torch that was built for CUDA, and this is {torch.__version__}; install "
            "requirements/cuda.txt, or take 'cuda-emulated', which runs the same code on a CPU"
        )
    _check_operator()
    try:
        torch.cuda.init()
    except RuntimeError as error:
        raise RuntimeError(
            f"platform: 'cuda' did not start: {error}; this torch is built for CUDA {torch.version.cuda}, which needs "
            "a GPU and a driver at least as new: update the driver, or install a torch for an older CUDA"
        ) from error
    if (count := torch.cuda.device_count()) != 1:
        raise RuntimeError(
            f"platform: a training process must see exactly one GPU, its own, and sees {count}; unset "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES where Ray is started, and without Ray set "
            "CUDA_VISIBLE_DEVICES to one"
        )
    if (capability := torch.cuda.get_device_capability(0)) < LEAST_CAPABILITY:
        raise RuntimeError(
            f"platform: {torch.cuda.get_device_name(0)} has compute capability {_version(capability)}, and the "
            f"attention kernels need {_version(LEAST_CAPABILITY)} (A100) or later; take another GPU"
        )


def _check_operator() -> None:
    if not torch.backends.cuda.is_flash_attention_available():
        raise RuntimeError(
            f"platform: torch {torch.__version__} was built without flash attention, which 'cuda' attends by; install "
            "the torch of requirements/cuda.txt"
        )
    try:
        from torch.nn.attention.varlen import varlen_attn

        lacking = {"scale", "window_size"} - inspect.signature(varlen_attn).parameters.keys()
    except ImportError:
        lacking = {"varlen_attn"}
    if lacking:
        raise RuntimeError(
            f"platform: torch {torch.__version__} has no {' and no '.join(sorted(lacking))} in "
            "torch.nn.attention.varlen, which 'cuda' attends by; install torch 2.11 or later"
        )


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
