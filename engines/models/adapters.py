"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model's linear layers: their names, shapes and cuts."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from engines.models.folders.adapter_folder import check_adapter_folder
from engines.models.joins import Join, Shape
from engines.models.spec import ModelSpec
from engines.models.weight import Way, Weight

if TYPE_CHECKING:  # adapters are listed before anything takes the time to import torch
    from torch import Tensor

GROUPS = {
    "attention": (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.in_proj",
        "self_attention.out_proj",
    ),
    "mlp": ("mlp.linear_fc1", "mlp.linear_fc2", "mlp.shared.mlp.linear_fc1", "mlp.shared.mlp.linear_fc2"),
}
"""Group of linear layers -> Megatron's names of them in a layer, delta nets' projections and shared experts among
them. Linear layers of a tower are of the group of their part, vision or projector."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_MOVE = 0.3
"""About three times the share of a layer's output by which random adapters change it, for weights of 1 / sqrt(in)."""
_LINEAR = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.weight")
_EXPERTS = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.weight\d")


@dataclass(frozen=True)
class ExpertColumns(Join):
    """Takes the columns of each expert, which alternate in one tensor, as a matrix of its own:
    ``[rows, columns * experts]`` becomes ``[experts, rows, columns]``."""

    experts: int = 1

    def find_shape(self, shapes: Sequence[Shape]) -> Shape:
        ((rows, columns),) = shapes
        return self.experts, rows, columns // self.experts

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(1, (-1, self.experts)).permute(2, 0, 1)

    def split(self, whole: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [whole.permute(1, 2, 0).flatten(1)]


@dataclass(frozen=True)
class Adapter:
    """The adapters of one of Megatron's linear layers ``[out, in]``: one of each HuggingFace layer that it is made of.

    Queries, keys and values are such layers, and so are gate and up projection. Megatron's layer has the rows of all in
    an order of its own. ``a`` stacks the A of those with an adapter, and ``b`` has a row for each row of the layer.

    Attributes:
        model: the model. weight: the layer's. layer: number of the decoder's layer, from 0; 0 of a tower.
        targets: names in a saved folder of those of the weight's tensors that have an adapter.
        is_of_experts: the layer is of all routed experts.
    """

    is_of_experts: ClassVar[bool] = False

    model: ModelSpec
    weight: Weight
    layer: int
    targets: tuple[str, ...]
    rank: int

    @property
    def name(self) -> str:
        """Megatron's name of the module that has both."""
        return self.weight.name.removesuffix("weight") + "adapter"

    @cached_property
    def a(self) -> Weight:
        """Rows ``[targets * rank, in]`` that make ``rank`` numbers of a token for each target."""
        columns = next(iter(self.weight.tensors.values()))[1]
        tensors = {name_in_peft(self.model, name, "A"): (self.rank, columns) for name in self.targets}
        cut: dict[int, Way] = {axis: way for axis, way in self.weight.cut.items() if axis == 1}
        return Weight(f"{self.name}.a", tensors, cut=cut, part=self.weight.part)

    @cached_property
    def b(self) -> Weight:
        """Rows ``[out, rank]`` that make the layer's outputs of those numbers; of tensors without an adapter, zeros."""
        shapes = {name: (shape[0], self.rank) for name, shape in self.weight.tensors.items()}
        tensors = {name_in_peft(self.model, name, "B"): shape for name, shape in shapes.items()}
        cut: dict[int, Way] = {axis: way for axis, way in self.weight.cut.items() if axis == 0}
        return replace(self.weight, name=f"{self.name}.b", tensors=tensors, cut=cut)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """PEFT's names of the adapters' tensors -> shape: ``A [rank, in]`` and ``B [out, rank]`` of each target."""
        names = {name_in_peft(self.model, name, kind) for name in self.targets for kind in "AB"}
        return {name: shape for name, shape in (self.a.tensors | self.b.tensors).items() if name in names}


@dataclass(frozen=True)
class ExpertAdapter(Adapter):
    """The adapters of one of Megatron's weights of all routed experts ``[experts, ..., in]``: one of each expert.

    They are those of PEFT's ``target_parameters``. Gate and up projection are one tensor of transformers' module, which
    has one A. ``a`` stacks the A of the experts; ``b`` is ``[experts, out, rank]``.
    """

    is_of_experts: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Megatron's name of the module that has both."""
        place, _, own = self.weight.name.rpartition(".")
        return f"{place}.adapter.{own}"

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Number of experts, and rows and columns of each."""
        count, *rows, columns = self.weight.cut_shape({"tp": 1, "ep": 1, "etp": 1})
        return count, math.prod(rows), columns

    @cached_property
    def a(self) -> Weight:
        """Rows ``[experts * rank, in]`` that make ``rank`` numbers of a token for each expert."""
        count, _, columns = self.shape
        tensors = {self._name_in_peft("A"): (count * self.rank, columns)}
        return Weight(f"{self.name}.a", tensors, cut={0: "ep"}, part=self.weight.part)

    @cached_property
    def b(self) -> Weight:
        """Rows ``[experts, out, rank]``; PEFT has columns of one expert after another, rank by rank."""
        count, rows, _ = self.shape
        tensors = {self._name_in_peft("B"): (rows, self.rank * count)}
        return Weight(f"{self.name}.b", tensors, ExpertColumns(experts=count), {0: "ep"}, self.weight.part)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """PEFT's names of both tensors -> shape."""
        return self.a.tensors | self.b.tensors

    @property
    def parameter(self) -> str:
        """Name of the parameter, as in PEFT's ``target_parameters``."""
        return ".".join(self.weight.module.split(".")[-3:])

    def _name_in_peft(self, kind: str) -> str:
        """Name A or B: PEFT wraps the module of both parameters twice, and the first of them is within."""
        place = self.model.find_module_name(self.weight.module.rpartition(".")[0])
        within = ".base_layer" if self.weight.name.endswith("1") else ""
        return f"base_model.model.{place}{within}.lora_{kind}.weight"


def name_in_peft(model: ModelSpec, name: str, kind: str) -> str:
    """Name the ``A`` or ``B`` of a weight of a model's folder as a folder of PEFT's does."""
    return f"base_model.model.{model.find_module_name(name).removesuffix('.weight')}.lora_{kind}.weight"


def _name_target(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]


def list_targets(model: ModelSpec) -> dict[str, str]:
    """Return name of a linear layer, as in PEFT's ``target_modules`` -> its group."""
    linear = _list_linear(model)
    return {_name_target(tensor): group for _, group, weight in linear for tensor in weight.tensors}


def list_adapters(model: ModelSpec, rank: int, targets: Sequence[str]) -> list[Adapter]:
    """List the adapters of a model, in the order of its weights.

    Args:
        targets: names of groups, and of linear layers as ``list_targets`` returns them.
    """
    found = []
    for layer, group, weight in _list_linear(model):
        chosen = tuple(name for name in weight.tensors if {group, _name_target(name)} & {*targets})
        if chosen:
            found.append(Adapter(model, weight, layer, chosen, rank))
    if "experts" in targets:
        places = ((_EXPERTS.fullmatch(name), weight) for name, weight in model.weights.items())
        found += [ExpertAdapter(model, weight, int(place[1]), (), rank) for place, weight in places if place]
    return found


def _list_linear(model: ModelSpec) -> list[tuple[int, str, Weight]]:
    """List the linear layers that may have adapters: number of the decoder's layer, group and weight of each."""
    found = []
    for name, weight in model.weights.items():
        place, shape = _LINEAR.fullmatch(name), next(iter(weight.tensors.values()))
        if place and place[2] in _GROUP_OF:
            found.append((int(place[1]), _GROUP_OF[place[2]], weight))
        if name.startswith("vision.") and name.endswith(".weight") and "embed" not in name and len(shape) == 2:
            found.append((0, weight.part, weight))
    return found


def check_start(folder: str, settings: Mapping[str, Any], adapters: Sequence[Adapter], where: str) -> None:
    """Check that a folder has these adapters, as ``check_adapter_folder``; ValueError where it has others."""
    shapes = {name: shape for adapter in adapters for name, shape in adapter.tensors.items()}
    check_adapter_folder(folder, settings, shapes, where)


def draw_start(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw an A as PEFT does, evenly from -1 to 1 over sqrt(in). It is of its name alone, so alike at all sizes."""
    return _draw(name, shape) / shape[1] ** 0.5


def draw_adapters(adapters: Sequence[Adapter], scale: float) -> dict[str, Tensor]:
    """Draw adapters by PEFT's names that change a model, of their names alone; exact in bfloat16.

    Args:
        scale: factor of their product, by which B is divided.
    """
    values = {}
    for adapter in adapters:
        for name, shape in adapter.tensors.items():
            is_a = name.endswith("A.weight")
            value = draw_start(name, shape) if is_a else _draw(name, shape) * (_MOVE / scale / adapter.rank**0.5)
            values[name] = value.bfloat16().float()
    return values


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw evenly from -1 to 1 by a name."""
    import torch

    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) - 1
