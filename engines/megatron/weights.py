"""HuggingFace weights into Megatron ranks and back out, as the model's family states them."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from engines.megatron.groups import get_cut_group
from engines.models.adapters import is_adapter
from engines.models.hf_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from engines.models.weight import EMBEDDING, OUTPUT, Weight

Named = TypeVar("Named")


def name_parameters(module: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Name this rank's parameters with layers numbered over the whole model; a stage's modules count from 0."""
    return number_layers(module, module.named_parameters())


def _name_weights(module: GPTModel, model: ModelSpec) -> dict[str, Tensor]:
    """Name this rank's parameters but for adapters, then the buffers that the model states, as ``name_parameters``
    does."""
    parameters = {name: each for name, each in name_parameters(module).items() if not is_adapter(name)}
    buffers = number_layers(module, module.named_buffers())
    return parameters | {name: buffer for name, buffer in buffers.items() if name in model.weights}


def number_layers(module: GPTModel, named: Iterable[tuple[str, Named]]) -> dict[str, Named]:
    """Number the layers in names of a stage's modules, or of their parameters, over the whole model."""
    offset = cast(TransformerLayer, module.decoder.layers[0]).layer_number - 1
    shift = lambda match: f"decoder.layers.{int(match[1]) + offset}."  # noqa: E731
    return {re.sub(r"^decoder\.layers\.(\d+)\.", shift, name): each for name, each in named}


def _join(weight: Weight, tensors: list[Tensor], model: ModelSpec, rows: int) -> Tensor:
    """Join HF tensors to one of Megatron's, as ``Weight.join`` says; a vocabulary is padded to ``rows``."""
    kind = weight.join
    if kind == "grouped":
        if not weight.order:
            return _group(torch.cat(tensors).split(weight.runs), weight.groups)
        runs = _ungroup(_group(tensors, weight.groups), weight.groups, weight.runs)
        return _group([runs[place] for place in weight.order], weight.groups)
    if kind == "gated_qkv":
        # [heads * 2 * d, h] of q: of each head its query, then its gate. A group has its queries above their gates.
        query = tensors[0].unflatten(0, (model.kv_heads, -1, 2, model.head_dim)).transpose(1, 2)
        return _group([query.flatten(0, 3), *tensors[1:]], model.kv_heads)
    if kind == "qkv":
        # [heads * d, h] of q and [kv_heads * d, h] of k and v -> [kv_heads, rows of a group, h]: q of group 0, its k,
        # its v, then group 1. So tensor parallelism cuts between groups and each rank has all that its heads need.
        parts = tensors if len(tensors) > 1 else tensors[0].split(_count_qkv_rows(model))
        return _group(parts, model.kv_heads)
    if kind in ("gated", "stacked"):
        return torch.cat(tensors)
    if kind == "experts":
        return torch.stack(tensors)
    if kind == "expert_columns":
        return tensors[0].unflatten(1, (-1, weight.groups)).permute(2, 0, 1)
    if kind == "gated_experts":
        return torch.stack(tensors).unflatten(0, (-1, 2))
    if kind == "fused_experts":
        return tensors[0].transpose(1, 2)  # [experts, f, h] -> [experts, h, f]
    if kind == "fused_gated_experts":
        return tensors[0].transpose(1, 2).unflatten(1, (2, -1))  # [experts, h, 2 f] -> [experts, 2, f, h]
    if kind == "vocabulary":
        return F.pad(tensors[0], (0, 0, 0, rows - tensors[0].shape[0]))  # [v, h] -> [rows, h], zeros at the end
    return tensors[0]


def _group(runs: Iterable[Tensor], groups: int) -> Tensor:
    """Join runs of rows: the first of ``groups`` parts of each run, then the second."""
    return torch.cat([run.unflatten(0, (groups, -1)) for run in runs], dim=1).flatten(0, 1)


def _ungroup(whole: Tensor, groups: int, rows: Iterable[int]) -> list[Tensor]:
    """Take runs of so many rows apart: the inverse of ``_group``."""
    parts = whole.unflatten(0, (groups, -1)).split([count // groups for count in rows], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _count_qkv_rows(model: ModelSpec) -> list[int]:
    """Count the rows of queries, keys and values, which a family has in a tensor each or in one, in this order."""
    return [heads * model.head_dim for heads in (model.heads, model.kv_heads, model.kv_heads)]


def _split(weight: Weight, whole: Tensor, model: ModelSpec) -> list[Tensor]:
    """Split a Megatron tensor into its HuggingFace tensors: the inverse of ``_join``."""
    rows = [shape[0] for shape in weight.tensors.values()]  # of each HF tensor, in the order of their join
    if weight.join == "expert_columns":
        return [whole.permute(1, 2, 0).flatten(1)]
    if weight.join in ("experts", "gated_experts"):
        return list(whole.flatten(0, -3))  # but for the last two axes, of which each HF tensor has its own
    if weight.join in ("fused_experts", "fused_gated_experts"):
        return [whole.flatten(1, -2).transpose(1, 2).contiguous()]
    if weight.join == "qkv":
        parts = _ungroup(whole, model.kv_heads, _count_qkv_rows(model))
        return parts if len(rows) > 1 else [torch.cat(parts)]
    if weight.join == "gated_qkv":
        query, *others = _ungroup(whole, model.kv_heads, rows)
        query = query.unflatten(0, (model.kv_heads, 2, -1, model.head_dim)).transpose(1, 2)
        return [query.flatten(0, 3), *others]
    if weight.join == "grouped":
        if not weight.order:
            return list(torch.cat(_ungroup(whole, weight.groups, weight.runs)).split(rows))
        runs = dict(zip(weight.order, _ungroup(whole, weight.groups, [weight.runs[place] for place in weight.order])))
        return _ungroup(_group([runs[place] for place in sorted(runs)], weight.groups), weight.groups, rows)
    return list(whole[: sum(rows)].split(rows))  # without the vocabulary's padding


def _cut_shard(weight: Weight, whole: Tensor) -> Tensor:
    """Cut out this rank's part of a whole tensor."""
    for axis, way in weight.cut.items():
        if (group := get_cut_group(way)).size() > 1:
            # Gate above up, [2 ffn, h]: each half is cut for itself, so that a rank has the same columns of both.
            halves = whole.chunk(2 if weight.join == "gated" else 1)
            whole = torch.cat([half.chunk(group.size(), dim=axis)[group.rank()] for half in halves])
    return whole


def cut_share(weight: Weight, tensors: list[Tensor], model: ModelSpec, rows: int = 0) -> Tensor:
    """Cut this rank's part out of a parameter that is joined from HF tensors.

    Args:
        rows: of a padded vocabulary over all ranks; other joins do not read it.
    """
    return _cut_shard(weight, _join(weight, tensors, model, rows))


def _unshard(weight: Weight, value: Tensor) -> Tensor:
    """Gather the whole tensor from every rank's part: the inverse of ``_cut_shard``. Collective."""
    for axis, way in reversed(weight.cut.items()):
        if (group := get_cut_group(way)).size() > 1:
            parts = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(parts, value.contiguous(), group=group)
            # Of a gated pair the gate of every rank, then up of every rank.
            halves = zip(*(part.chunk(2 if weight.join == "gated" else 1) for part in parts))
            value = torch.cat([torch.cat(half, dim=axis) for half in halves])
    return value


def _read(folder: SafetensorsFolder, weight: Weight) -> tuple[Weight, list[Tensor]]:
    """Read the tensors of a weight, those of experts for this rank's alone; return what is left to cut, and them."""
    if weight.cut.get(0) != "ep":
        return weight, [folder[name] for name in weight.tensors]
    group, names = get_cut_group("ep"), list(weight.tensors)
    weight = replace(weight, cut={axis: way for axis, way in weight.cut.items() if axis})
    if weight.join in ("experts", "gated_experts"):  # a tensor of each expert, or two
        count = len(names) // group.size()
        return weight, [folder[name] for name in names[group.rank() * count :][:count]]
    count = weight.tensors[names[0]][0] // group.size()
    return weight, [folder.read_rows(names[0], group.rank() * count, count)]


@torch.no_grad()
def load_weights(module: GPTModel, model: ModelSpec, loaded: Container[Tensor] = ()) -> None:
    """Fill this rank's parameters and buffers from the model's folder; a critic's head that it lacks stays zero.

    Args:
        loaded: parameters that are left as they are.

    Raises:
        ValueError: the folder lacks a weight, has an unknown one, or a weight has another shape than in the config.
    """
    folder = SafetensorsFolder(model.folder)
    folder.check(model)
    for name, parameter in _name_weights(module, model).items():
        # The last pipeline stage of a tied model keeps its own copy of the embedding as output layer.
        weight = model.find_weight(EMBEDDING if model.tied and name == OUTPUT else name)
        if parameter in loaded or any(n not in folder for n in weight.tensors):
            continue
        rows = parameter.shape[0] * mpu.get_tensor_model_parallel_world_size()
        value = cut_share(*_read(folder, weight), model, rows)
        if value.shape != parameter.shape:
            raise ValueError(
                f"model: {list(weight.tensors)} in {model.folder!r} give {name} the shape {tuple(value.shape)}, "
                f"expected {tuple(parameter.shape)} from config.json"
            )
        parameter.copy_(value)


def export_weights(
    module: GPTModel, model: ModelSpec, value_of=lambda p: p.data, only_helps: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(HF name, full tensor)`` of every weight, on every rank of the model-parallel group, one at a time.

    Args:
        value_of: function of a parameter or buffer that returns the tensor to export, such as its gradient.
        only_helps: yield nothing and hand out this rank's parts of experts alone, which ranks of several replicas
            hold between them.
    """
    parameters = _name_weights(module, model)
    if model.tied:
        parameters.pop(OUTPUT, None)  # the last stage's copy of the embedding, which the first stage gives out
    return export_tensors(parameters, model, model.find_weight, value_of, only_helps)


@torch.no_grad()
def export_tensors(
    named: Mapping[str, Tensor], model: ModelSpec, find: Callable[[str], Weight], value_of, only_helps: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(HF name, full tensor)`` of this rank's tensors and those of other stages, as ``export_weights`` does.

    Args:
        named: the tensors of this rank by Megatron's names. find: returns the weight of a name, of any stage.
    """
    stages = cast(dist.ProcessGroup, mpu.get_pipeline_model_parallel_group())
    names_by_stage: list[list[str]] = [[]] * stages.size()
    dist.all_gather_object(names_by_stage, list(named), group=stages)
    # Every rank goes through the same names in the same order, since each of them is a collective.
    for stage, names in enumerate(names_by_stage):
        for name in names:
            weight, mine = find(name), None
            if stage == stages.rank() and (not only_helps or "ep" in weight.cut.values()):
                mine = _unshard(weight, value_of(named[name]))
            if only_helps:
                continue
            whole = _send_from_stage(mine, stage, stages)
            yield from zip(weight.tensors, _split(weight, whole, model), strict=True)


def _send_from_stage(mine: Tensor | None, stage: int, stages: dist.ProcessGroup) -> Tensor:
    """Broadcast a tensor from the pipeline stage that has it to all stages. Collective."""
    if mine is not None and stages.size() == 1:
        return mine
    source = dist.get_global_rank(stages, stage)
    # Receivers need shape and dtype before they can make room for the tensor itself.
    head: list[Any] = [None if mine is None else (mine.shape, mine.dtype, mine.device)]
    dist.broadcast_object_list(head, src=source, group=stages)
    shape, dtype, device = head[0]
    whole = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine.contiguous()
    dist.broadcast(whole, src=source, group=stages)
    return whole
