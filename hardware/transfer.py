"""Copy the arrays of a micro-batch to the device, without waiting for the copy."""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """Copy ``values`` to ``device`` and return the tensor, without waiting for the copy.

    Host memory is pinned first, so that the device copies it while the host goes on. Torch keeps pinned memory until
    the copy is done.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
