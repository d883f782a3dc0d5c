"""MindSpeed beside the NPU platform, if a variable asks for it: the order of its import, and the lengths that it reads.

MindSpeed replaces functions of Megatron while ``mindspeed.megatron_adaptor`` is imported, and so has to come first. It
keeps the lengths of a pack's sequences in a variable of the process (``_ACTUAL_SEQ_LEN``, in two of its modules), which
its replacements may read. This project's core attention never reads them.

``RLWORKER_MINDSPEED=1`` asks for it. An installed MindSpeed is not used without that: the version of July 2026 is for
megatron-core 0.12.1, and patches functions of any other version without an error.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from itertools import accumulate

import torch

from hardware.attention.inputs import AttentionInputs

KEEPERS = ("mindspeed.utils", "mindspeed.core.context_parallel.get_batch_utils")
"""Modules of MindSpeed that keep lengths (its commit a97d6a7, July 2026)."""


def patch_megatron() -> None:
    """Let MindSpeed patch Megatron, if RLWORKER_MINDSPEED is set.

    Raises:
        RuntimeError: MindSpeed is not installed, or Megatron was imported before.
    """
    if os.environ.get("RLWORKER_MINDSPEED") != "1":
        return
    if importlib.util.find_spec("mindspeed") is None:
        raise RuntimeError(
            "mindspeed: RLWORKER_MINDSPEED=1 asks for MindSpeed, which is not installed; install it, or unset the "
            "variable"
        )
    if "megatron.core" in sys.modules and "mindspeed.megatron_adaptor" not in sys.modules:
        raise RuntimeError(
            "mindspeed: megatron was imported before mindspeed.megatron_adaptor, which would patch it in part; start "
            "the platform (init_process) before anything that imports megatron"
        )
    importlib.import_module("mindspeed.megatron_adaptor")


@contextlib.contextmanager
def pass_lengths(inputs: AttentionInputs) -> Iterator[None]:
    """Set MindSpeed's variable to the pack's boundaries in this context, which is one forward, and reset it afterwards.

    Recomputation in the backward pass runs without them; only MindSpeed's replacements would read them.
    """
    keepers = [sys.modules[name] for name in KEEPERS if name in sys.modules]
    before = [keeper.get_actual_seq_len() for keeper in keepers]
    spec = inputs.spec
    ends = torch.tensor([end // spec.cp for end in accumulate(spec.padded)]) if spec.kind == "thd" else None
    for keeper in keepers:
        keeper.set_actual_seq_len(ends)
    try:
        yield
    finally:
        for keeper, value in zip(keepers, before):
            keeper.set_actual_seq_len(value)
