"""HuggingFace weights into Megatron ranks and back out, as the model's family states them."""

import re
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from torch import Tensor

from engines.models.family import EMBEDDING, OUTPUT, Join, Weight
from engines.models.hf_folder import SafetensorsFolder
from engines.models.spec import ModelSpec


def _name_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters, layers numbered over the whole model."""
    offset = module.decoder.layers[0].layer_number - 1
    shift = lambda match: f"decoder.layers.{int(match[1]) + offset}."  # noqa: E731
    return {re.sub(r"^decoder\.layers\.(\d+)\.", shift, name): p for name, p in module.named_parameters()}


def _join(kind: Join, tensors: list[Tensor], model: ModelSpec, rows: int) -> Tensor:
    """HF tensors -> one Megatron tensor: qkv by query group, gate above up, vocabulary padded to ``rows``."""
    if kind == "qkv":
        groups = [t.unflatten(0, (model.kv_heads, -1)) for t in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)
    if kind == "gated":
        return torch.cat(tensors)
    if kind == "vocabulary":
        return F.pad(tensors[0], (0, 0, 0, rows - tensors[0].shape[0]))
    return tensors[0]


def _split(weight: Weight, whole: Tensor, model: ModelSpec) -> list[Tensor]:
    """The inverse of ``_join``."""
    rows = [shape[0] for shape in weight.tensors.values()]
    if weight.join == "qkv":
        groups = whole.unflatten(0, (model.kv_heads, -1))
        parts = groups.split([count // model.kv_heads for count in rows], dim=1)
        return [part.flatten(0, 1) for part in parts]
    return list(whole[: sum(rows)].split(rows))


def _is_cut(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False) and mpu.get_tensor_model_parallel_world_size() > 1


def _cut_shard(kind: Join, whole: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """This tensor-parallel rank's part; gate and up are cut apart so that each rank holds both."""
    if not _is_cut(parameter):
        return whole
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if kind == "gated":
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=parameter.partition_dim)[rank]


def _unshard(kind: Join, parameter: torch.nn.Parameter, value: Tensor) -> Tensor:
    """The whole tensor from every tensor-parallel rank's part. Collective."""
    if not _is_cut(parameter):
        return value
    group = mpu.get_tensor_model_parallel_group()
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    if kind == "gated":
        halves = zip(*(part.chunk(2) for part in parts))
        return torch.cat([torch.cat(half) for half in halves])
    return torch.cat(parts, dim=parameter.partition_dim)


@torch.no_grad()
def load_weights(module: torch.nn.Module, model: ModelSpec) -> None:
    """Fill this rank's parameters from the model's folder; a critic's head that the folder lacks stays as it is, zero.

    Raises:
        ValueError: the folder lacks a weight, has one too many, or one has another shape than the config says.
    """
    folder = SafetensorsFolder(model.folder)
    folder.check(model)
    for name, parameter in _name_parameters(module).items():
        # The last pipeline stage of a tied model keeps its own copy of the embedding as output layer.
        weight = model.find_weight(EMBEDDING if model.tied and name == OUTPUT else name)
        if any(n not in folder for n in weight.tensors):
            continue
        rows = parameter.shape[0] * mpu.get_tensor_model_parallel_world_size()
        tensors = [folder[n] for n in weight.tensors]
        value = _cut_shard(weight.join, _join(weight.join, tensors, model, rows), parameter)
        if value.shape != parameter.shape:
            raise ValueError(
                f"model: {list(weight.tensors)} in {model.folder!r} give {name} the shape {tuple(value.shape)}, "
                f"expected {tuple(parameter.shape)} from config.json"
            )
        parameter.copy_(value)


@torch.no_grad()
def export_weights(
    module: torch.nn.Module, model: ModelSpec, value_of=lambda p: p.data
) -> Iterator[tuple[str, Tensor]]:
    """``(HF name, full tensor)`` of every weight, on every rank of the model-parallel group, one at a time.

    Args:
        value_of: what to export of a parameter; its gradient, say.
    """
    stages = mpu.get_pipeline_model_parallel_group()
    mine = _name_parameters(module)
    if model.tied:
        mine.pop(OUTPUT, None)
    names_of = [None] * stages.size()
    dist.all_gather_object(names_of, list(mine), group=stages)
    for stage, names in enumerate(names_of):
        for name in names:
            weight, whole = model.find_weight(name), None
            if stage == stages.rank():
                whole = _unshard(weight.join, mine[name], value_of(mine[name]))
            if stages.size() > 1:
                whole = _send_from_stage(whole, stage, stages)
            yield from zip(weight.tensors, _split(weight, whole, model), strict=True)


def _send_from_stage(whole: Tensor | None, stage: int, stages) -> Tensor:
    """Send a tensor from one pipeline stage to all others. Collective."""
    source = dist.get_global_rank(stages, stage)
    head = [None if whole is None else (whole.shape, whole.dtype, whole.device)]
    dist.broadcast_object_list(head, src=source, group=stages)
    shape, dtype, device = head[0]
    whole = torch.empty(shape, dtype=dtype, device=device) if whole is None else whole.contiguous()
    dist.broadcast(whole, src=source, group=stages)
    return whole
