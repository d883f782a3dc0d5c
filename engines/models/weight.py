"""A parameter of a model, by Megatron's name and by those of HuggingFace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron's names of the two parameters that are one where embeddings are tied."""

Head = Literal["language", "value"]
"""Kind of output that the last hidden states become: logits, or the value of a critic."""
Part = Literal["vision", "projector", "language", "router"]
"""Parts of a model that can be frozen: a vision tower's blocks, the layers that map their features to tokens, the
language model, and of it the routers of experts alone."""
Join = Literal[
    "whole",
    "qkv",
    "gated_qkv",
    "grouped",
    "gated",
    "stacked",
    "vocabulary",
    "experts",
    "gated_experts",
    "fused_experts",
    "fused_gated_experts",
    "expert_columns",
]
Way = Literal["tp", "ep", "etp"]
"""Ways to cut a parameter over ranks: tensor and expert parallelism, and the tensor parallelism of experts."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of Megatron's, and HuggingFace's tensors that it is joined from along their first axis.

    Attributes:
        name: Megatron's. A family names it within its layer, a ``ModelSpec`` within the model.
        tensors: HF name -> whole shape, in the order in which they are joined.
        join: ``whole`` takes the only tensor as it is, ``qkv`` joins by query group, ``gated`` puts the gate above the
            up projection and cuts each for itself, ``stacked`` puts one below the other, ``vocabulary`` pads the rows
            to a multiple of the ranks. The parts of ``qkv`` and ``gated`` are a tensor each, or one that has them in
            this order. ``gated_qkv`` joins as ``qkv`` does where each head's query has a gate behind it, queries of a
            group before their gates. ``grouped`` takes the first part of each of some runs of rows, then the second;
            with an ``order`` a tensor has its runs so already, and they change places. ``experts`` stacks a tensor of
            each expert, ``gated_experts`` gate and up of each. ``fused_experts`` transposes a tensor of all experts,
            ``[experts, f, h]``, and ``fused_gated_experts`` one of gate and up side by side, ``[experts, h, 2 f]``.
            ``expert_columns`` takes the columns of each of ``groups`` experts, which alternate, as a matrix of its own.
        groups, runs: for ``grouped``, the number of parts of a run, and the rows of each run.
        order: for ``grouped``, the place among ``runs`` of each run of Megatron's tensor.
        cut: axis of Megatron's tensor -> the way in which it is cut; empty where every rank has all of it.
        module: name of the one tensor of transformers' module that has all of ``tensors``, where it is not as in a
            folder; empty where it is.
        is_head: it is of a critic's head, which learns where its part is frozen too.
        is_buffer: no gradient reaches it, no optimizer has it, and it is in fp32 at every dtype of the model.
    """

    name: str
    tensors: dict[str, tuple[int, ...]]
    join: Join = "whole"
    cut: dict[int, Way] = field(default_factory=dict)
    part: Part = "language"
    module: str = ""
    is_head: bool = False
    is_buffer: bool = False
    groups: int = 1
    runs: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def within(self, place: str, hf_place: str) -> Weight:
        """Name the same parameter from further out, on both sides."""
        tensors = {hf_place + name: shape for name, shape in self.tensors.items()}
        module = self.module and hf_place + self.module
        return replace(self, name=place + self.name, tensors=tensors, module=module)

    def cut_shape(self, sizes: Mapping[Way, int]) -> tuple[int, ...]:
        """Compute the shape that Megatron gives it on each rank, of as many ranks as ``sizes`` has for each way."""
        shapes = list(self.tensors.values())
        shape = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        if self.join == "experts":
            shape = [len(shapes), *shapes[0]]
        elif self.join == "gated_experts":
            shape = [len(shapes) // 2, 2, *shapes[0]]
        elif self.join == "fused_experts":
            shape = [shape[0], shape[2], shape[1]]
        elif self.join == "fused_gated_experts":
            shape = [shape[0], 2, shape[2] // 2, shape[1]]
        elif self.join == "expert_columns":
            shape = [self.groups, shape[0], shape[1] // self.groups]
        if self.join == "vocabulary":
            shape[0] = -(-shape[0] // sizes["tp"]) * sizes["tp"]
        for axis, way in self.cut.items():
            shape[axis] //= sizes[way]
        return tuple(shape)
