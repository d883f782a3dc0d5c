"""Answers in place of the other ranks: sizes of hidden states, of rows for experts, names of weights."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from engines.megatron.layout import Layout
from engines.megatron.memory.estimate import list_weights
from engines.models.weight import is_adapter
from hardware.megatron.experts import ExpertLayer
from hardware.shapes.device import ShapeMode
from rlworker.checks.shapes.case import RankCase


def tell_stages(case: RankCase, mode: ShapeMode) -> None:
    """Tell the shape ``[s / tp, b, h]`` of hidden states and gradients wherever a stage asks for it."""
    config, ask = case.config, P2PCommunicator._communicate_shapes
    sizes: dict[str, Any] = dict(tp=config.tp, cp=config.cp, multiple=config.pad_to_multiple_of, slots=config.slots)
    rows, slots = Layout.build((case.length - 1,) * case.sequences, config.layout, **sizes).shape
    shape = slots // config.tp, rows, case.model.hidden

    def answer(self, send_next, send_prev, recv_prev: bool, recv_next: bool):
        mode.give(shape * (recv_prev + recv_next))
        return ask(self, send_next, send_prev, recv_prev, recv_next)

    communicator: Any = P2PCommunicator
    communicator._communicate_shapes = answer


def tell_experts(case: RankCase, mode: ShapeMode) -> None:
    """Tell how many rows go to each rank of experts and come from it, by ``case.routes``."""
    exchange = ExpertLayer._exchange

    def answer(self, rows: Tensor, weights: Tensor, numbers: Tensor):
        ranks, parts = self.group.size(), self.experts.etp.size()
        chosen = self.router.mixture.chosen
        mode.give(_share_rows(len(rows), ranks, parts, self.group.rank(), case, chosen, self.experts.count))
        return exchange(self, rows, weights, numbers)

    ExpertLayer._exchange = answer


def _share_rows(rows: int, ranks: int, parts: int, rank: int, case: RankCase, chosen: int, own: int) -> Iterator[int]:
    """Yield the rows that go to each rank, then those that come from each; the parts of an expert get the same."""
    groups, mine = ranks // parts, rank // parts
    if case.routes == "worst":  # a token chooses each expert once
        here = rows // chosen * min(chosen, own)
        others, rest = divmod(rows - here, max(1, groups - 1))
        to = [others + (place < rest) for place in range(groups - 1)]
        to.insert(mine, here)
        back = [here] * ranks
    else:
        each, rest = divmod(rows, groups)
        to = [each + (place < rest) for place in range(groups)]
        back = [to[mine]] * ranks
    yield from (count for count in to for _ in range(parts))
    yield from back


def tell_objects(case: RankCase, device: torch.device) -> None:
    """Tell the names and shapes of other stages' weights at an export; all else is alike on all ranks."""
    config, stages = case.config, range(case.config.pp)
    weights = [[w for w in list_weights(case.model, config, stage) if not is_adapter(w.name)] for stage in stages]
    names = [[weight.name for weight in own] for own in weights]
    missing = (weight for stage, own in enumerate(weights) if stage != case.stage for weight in own)

    def gather(found: list, own: Any, group: Any = None) -> None:
        is_stages = len(found) == config.pp and isinstance(own, list) and {*names[case.stage]} == {*map(str, own)}
        found[:] = [*names[: case.stage], own, *names[case.stage + 1 :]] if is_stages else [own] * len(found)

    def broadcast(found: list, **_: Any) -> None:
        if found[0] is None:
            weight = next(missing)
            shape = list(weight.cut_shape(config.cut_sizes))
            for axis, way in weight.cut.items():
                shape[axis] *= config.cut_sizes[way]
            found[0] = shape, torch.float32 if weight.is_buffer else getattr(torch, config.dtype), device

    torch_dist: Any = dist
    torch_dist.all_gather_object, torch_dist.broadcast_object_list = gather, broadcast
