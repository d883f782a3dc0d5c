"""Lets torchvision be imported beside a CPU build of torch, in every process of an environment.

The package index has torchvision built for CUDA alone. Its operators then cannot be loaded, and its Python code, which
refers to two of them while it is imported, fails. Nothing here runs those two (they belong to object detection), so
they are declared without an implementation. ``scripts/setup.sh`` puts this module into the environment and has every
Python of it import it as it starts, because vLLM looks at models in processes of its own.
"""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision where it is, and declares its operators before its own loader runs. To look for it, as some
    do who only ask whether it is there, imports nothing."""

    def __init__(self):
        self.loader = None

    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "torchvision" else None
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        sys.meta_path.remove(self)
        _declare_operators(Path(module.__file__).parent)
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)


def _declare_operators(folder: Path) -> None:
    import torch

    try:
        torch.ops.load_library(next(folder.glob("_C*")))
    except (StopIteration, OSError):
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", _SCHEMA)


sys.meta_path.insert(0, BeforeTorchvision())
