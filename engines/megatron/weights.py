"""HuggingFace weights into Megatron ranks and back out, as the model's family states them."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from engines.megatron.groups import get_cut_group
from engines.models.folders.hf_folder import check_tensors
from engines.models.safetensors_folder import SafetensorsFolder
from engines.models.spec import ModelSpec
from engines.models.weight import EMBEDDING, OUTPUT, Weight, is_adapter

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


def _cut_shard(weight: Weight, whole: Tensor) -> Tensor:
    """Cut out this rank's part of a whole tensor."""
    for axis, way in weight.cut.items():
        if (group := get_cut_group(way)).size() > 1:
            whole = weight.join.cut(whole, axis, ranks=group.size(), rank=group.rank())
    return whole


def cut_share(weight: Weight, tensors: list[Tensor]) -> Tensor:
    """Cut this rank's part out of a parameter that is joined from HF tensors."""
    return _cut_shard(weight, weight.join.join(tensors))


def _unshard(weight: Weight, value: Tensor) -> Tensor:
    """Gather the whole tensor from every rank's part: the inverse of ``_cut_shard``. Collective."""
    for axis, way in reversed(weight.cut.items()):
        if (group := get_cut_group(way)).size() > 1:
            shares = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(shares, value.contiguous(), group=group)
            value = weight.join.gather(shares, axis)
    return value


def _read_share(folder: SafetensorsFolder, weight: Weight) -> Tensor:
    """Read this rank's part of a weight; of experts, no tensor and no row of other ranks'."""
    if weight.cut.get(0) != "ep":
        return cut_share(weight, [folder[name] for name in weight.tensors])
    group = get_cut_group("ep")
    experts = weight.join.read_share(folder, weight.tensors, ranks=group.size(), rank=group.rank())
    within_experts = {axis: way for axis, way in weight.cut.items() if axis}
    return cut_share(replace(weight, cut=within_experts), experts)


@torch.no_grad()
def load_weights(module: GPTModel, model: ModelSpec, loaded: Container[Tensor] = ()) -> None:
    """Fill this rank's parameters and buffers from the model's folder; a critic's head that it lacks stays zero.

    Args:
        loaded: parameters that are left as they are.

    Raises:
        ValueError: the folder lacks a weight, has an unknown one, or a weight has another shape than in the config.
    """
    folder = SafetensorsFolder(model.folder)
    check_tensors(folder, model)
    for name, parameter in _name_weights(module, model).items():
        # The last pipeline stage of a tied model keeps its own copy of the embedding as output layer.
        weight = model.find_weight(EMBEDDING if model.tied and name == OUTPUT else name)
        if parameter in loaded or any(n not in folder for n in weight.tensors):
            continue
        value = _read_share(folder, weight)
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
    return export_tensors(parameters, model.find_weight, value_of, only_helps)


@torch.no_grad()
def export_tensors(
    named: Mapping[str, Tensor], find: Callable[[str], Weight], value_of, only_helps: bool = False
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
            yield from weight.split(whole).items()


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
