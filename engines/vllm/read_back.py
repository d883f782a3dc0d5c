"""Read weights back from vLLM's model, as it computes with them, under the names by which they were sent.

vLLM joins tensors, splits them over devices and, on a CPU, multiplies with packed copies of an opaque format. Its own
loaders load tensors without data here; each copy that they would make shows the place of rows and columns. A packed
copy is read by computing with it: its product with a unit vector is a column, bit for bit. Packed experts, whose
product is no linear one, are read where packing moved their numbers to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from engines.weight_digest import DigestPlan, find_matrix_shape, sum_columns, sum_rows
from hardware.vllm_versions import CPU_EXPERTS

_UNIT_VECTORS = 64
"""Number of columns of a packed copy that are read at a time."""
_NOT_PACKED = "none"
"""vLLM's name of the instructions of experts that are not packed, in versions before ``CPU_EXPERTS``."""
_TORN = -1
"""Digest of a tensor whose copies differ; real digests are never negative."""


@dataclass(frozen=True)
class Block:
    """A block of a tensor, which is seen as the matrix as which it is digested."""

    row: int
    column: int
    rows: int
    columns: int


Reading = tuple[str, Block, int]
"""Name of a tensor as it was sent, a block of it, and the digest of the block."""


@dataclass(frozen=True)
class _Load:
    """A block of the sent tensor ``name``, which has ``width`` columns, and where vLLM loads it.

    Attributes:
        parameter: name of the module's. shape: that it has while it is loaded.
        is_transposed: rows of the source become columns of the target.
    """

    name: str
    width: int
    source: Block
    module: nn.Module
    parameter: str
    shape: torch.Size
    target: Block
    is_transposed: bool


class ReadBack:
    """Reads the weights of a worker's model.

    Args:
        shapes: HuggingFace name -> shape of each weight as it is sent.
        tied: whether the embedding is the output layer too. dtype: name of the model's dtype.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], tied: bool, dtype: str):
        self._model, self._tied, self._dtype = model, tied, getattr(torch, dtype)
        self._loads: dict[tuple, list[_Load]] = defaultdict(list)
        """Loads into one parameter with the same columns, which are read together."""
        self._transposed: dict[tuple[nn.Module, str, torch.Size], list[_Load]] = defaultdict(list)
        """Transposed loads into one parameter."""
        for load in _trace_loads(model, shapes, self._dtype):
            if load.is_transposed:
                self._transposed[load.module, load.parameter, load.shape].append(load)
                continue
            source, target = load.source, load.target
            key = load.module, load.parameter, load.shape, load.width, source.column, target.column, source.columns
            self._loads[key].append(load)

    def digest(self, plan: DigestPlan) -> list[Reading]:
        """Digest the weights that the model computes with; a block with several copies is digested once for each."""
        readings: list[Reading] = []
        for (module, parameter, shape, width, start, offset, count), loads in self._loads.items():
            columns = plan.choose(width)  # of the whole tensor, alike on all devices: this one has some of them
            columns = columns[(columns >= start) & (columns < start + count)]
            for sums in self._sum_copies(module, parameter, shape, columns - start + offset, columns):
                for load in loads:
                    rows = sums[load.target.row : load.target.row + load.target.rows]
                    readings.append((load.name, load.source, sum_rows(rows, load.source.row)))
        for (module, parameter, shape), loads in self._transposed.items():
            readings += self._digest_transposed(plan, _read_matrices(module, parameter, shape), loads)
        return readings

    def _digest_transposed(
        self, plan: DigestPlan, matrices: Iterable[tuple[int, Tensor]], loads: Sequence[_Load]
    ) -> Iterator[Reading]:
        """Digest blocks that lie transposed in a parameter.

        Args:
            matrices: the parameter, as matrices one below another: the first row of each, and the matrix.
        """
        for first, matrix in matrices:
            for load in loads:
                source, target = load.source, load.target
                if not first <= target.row < first + len(matrix):
                    continue
                rows = slice(target.row - first, target.row - first + target.rows)
                block = matrix[rows, target.column : target.column + target.columns].t()
                columns = plan.choose(load.width)
                columns = columns[(columns >= source.column) & (columns < source.column + source.columns)]
                sums = sum_columns(block, columns - source.column, columns, self._dtype)
                yield load.name, source, sum_rows(sums, source.row)

    def _sum_copies(
        self, module: nn.Module, name: str, shape: torch.Size, places: np.ndarray, columns: np.ndarray
    ) -> Iterator[Tensor]:
        """Sum columns of a parameter as ``sum_columns`` does, of itself and of every packed copy: ``[rows]`` each."""
        kept = getattr(module, name)
        if kept.shape == shape or _find_packing(module, shape):
            parts = _read_matrices(module, name, shape)
            yield torch.cat([sum_columns(part, places, columns, self._dtype) for _, part in parts])
        if len(shape) == 3:  # a stack of experts has no further copy
            return
        for user in self._list_users(module) if name == "weight" else ():
            sums = torch.zeros(shape[0], dtype=torch.int64)
            for start in range(0, len(places), _UNIT_VECTORS):
                part = slice(start, start + _UNIT_VECTORS)
                units = torch.zeros(len(places[part]), shape[1], dtype=kept.dtype)  # a router's may be in fp32
                units[torch.arange(len(units)), torch.from_numpy(places[part])] = 1
                product: Tensor = user.quant_method.apply(user, units)  # [vectors, rows]
                sums += sum_columns(product.t(), np.arange(len(units)), columns[part], self._dtype)
            yield sums

    def _list_users(self, module: nn.Module) -> list[Any]:
        """List the modules that multiply with a packed copy of a module's weight."""
        users = [module]
        if isinstance(module, VocabParallelEmbedding):  # by itself it only looks rows up
            heads = [one for one in self._model.modules() if isinstance(one, ParallelLMHead)]
            users = [one for one in heads if one.weight is module.weight] or users * self._tied
        return [user for user in users if hasattr(user, "cpu_linear")]


class _CopyRecorder(TorchDispatchMode):
    """Notes each copy from a tensor to another and makes none."""

    def __init__(self):
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


def _trace_loads(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[_Load]:
    """Find where vLLM loads weights, without changing the model. Loads other than blocks of rows and columns are left
    out."""
    sent = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    names = {_find_storage(tensor): name for name, tensor in sent.items()}
    recorder = _CopyRecorder()
    for module in model.modules():  # parameters that packing emptied have their shapes again
        info = get_layerwise_info(module)
        info.kernel_tensors = get_layer_params_buffers(module)
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        restore_layer_on_meta(module, info)
    try:
        places: dict[int, tuple[nn.Module, str, Tensor]] = {}
        for module in model.modules():
            for name, tensor in get_layer_tensors(module).items():
                places[_find_storage(tensor)] = module, name, tensor
                if hasattr(tensor, "weight_loader"):  # the last reload's waits for the rest of a layer
                    tensor.weight_loader = _get_original_loader(tensor)  # pyright: ignore[reportAttributeAccessIssue]  vLLM sets it
        with recorder:
            model.load_weights(iter(sent.items()))  # pyright: ignore[reportCallIssue]  a method of each model of vLLM's
    finally:
        for module in model.modules():
            info = get_layerwise_info(module)
            _place_kernel_tensors(module, info)
            info.reset()
    for target, source in recorder.copies:
        name, place = names.get(_find_storage(source)), places.get(_find_storage(target))
        if name is None or place is None:
            continue
        module, parameter, whole = place
        taken, given = _find_block(source, sent[name].shape), _find_block(target, whole.shape)
        if taken is None or given is None:
            continue
        _, width = find_matrix_shape(sent[name].shape)
        is_transposed = _is_transposed(source, sent[name].shape) != _is_transposed(target, whole.shape)
        yield _Load(name, width, taken, module, parameter, whole.shape, given, is_transposed)


def _read_matrices(module: nn.Module, name: str, shape: torch.Size) -> Iterator[tuple[int, Tensor]]:
    """Read a parameter as matrices one below another: the first row of each, and the matrix. Each expert of a stack
    that is packed is unpacked as a matrix of its own."""
    kept = getattr(module, name).detach()
    if isa := _find_packing(module, shape):
        _, rows, columns = shape
        order = _trace_packing(kept[:1], isa)
        for number, expert in enumerate(kept):
            yield number * rows, _unpack_expert(expert, order, (rows, columns))
    else:
        yield 0, kept.reshape(find_matrix_shape(shape))


def _find_packing(module: nn.Module, shape: torch.Size) -> str:
    """Find the instructions for which a CPU's layer of experts has packed a parameter of this shape; empty of others,
    such as the experts' biases."""
    if len(shape) != 3:
        return ""
    method = getattr(module, "quant_method", None)
    if not CPU_EXPERTS.is_there:
        isa = getattr(getattr(method, "cpu_fused_moe", None), "isa", _NOT_PACKED)
        return "" if isa == _NOT_PACKED else isa
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return "" if getattr(experts, "_use_zentorch", True) else getattr(experts, "isa", "")


def _trace_packing(packed: Tensor, isa: str) -> Tensor:
    """Trace where the numbers of an expert ``[1, rows, columns]`` lie that is packed, alike in all: ``[n]`` long, the
    place of each before. Their places are packed in four digits, since bfloat16 counts no further than 256."""
    from vllm._custom_ops import cpu_prepack_moe_weight  # older versions, on other platforms, have none

    places = torch.arange(packed.numel(), device=packed.device)
    order = torch.zeros_like(places)
    for shift in (0, 8, 16, 24):
        digit = (places >> shift & 255).to(packed.dtype).view(packed.shape)
        order += cpu_prepack_moe_weight(digit, isa).flatten().long() << shift
    return order


def _unpack_expert(packed: Tensor, order: Tensor, shape: tuple[int, int]) -> Tensor:
    """Undo the packing of an expert ``[rows, columns]``, and the zeros that were put in below the rows of its gate and
    its up projection, or beside the columns of its down projection."""
    rows, columns = shape
    moved = torch.empty_like(order, dtype=packed.dtype).index_copy_(0, order, packed.flatten()).view(packed.shape)
    if len(moved) > rows:
        moved = moved.unflatten(0, (2, -1))[:, : rows // 2].flatten(0, 1)
    return moved[:, :columns]


def _find_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_transposed(view: Tensor, shape: Sequence[int]) -> bool:
    """Tell whether a view of a contiguous tensor of some shape reads its matrix transposed."""
    _, width = find_matrix_shape(shape)
    return view.dim() == 2 and width > 1 and view.stride() == (1, width) and view.shape != (1, 1)


def _find_block(view: Tensor, shape: Sequence[int]) -> Block | None:
    """Find the block of a tensor's matrix that a view is; None where it is none.

    Args:
        shape: of the tensor, which is contiguous.
    """
    _, width = find_matrix_shape(shape)
    row, column = divmod(int(view.storage_offset()), width)
    if _is_transposed(view, shape):
        return Block(row, column, rows=view.shape[1], columns=view.shape[0])
    if view.dim() == 2:
        is_block = view.stride() == (width, 1)
        return Block(row, column, *view.shape) if is_block else None
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    is_whole = view.stride() == strides and view.shape[1:] == tuple(shape[1:])
    return Block(row, column, *find_matrix_shape(view.shape)) if is_whole else None


def merge_readings(parts: Iterable[Sequence[Reading]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int | None]:
    """Add up the readings of an engine's workers to a digest of every tensor.

    Args:
        shapes: name -> shape of each tensor.

    Returns:
        name -> digest; None for a tensor that was not read whole, and a negative number if copies of a block differ.
    """
    blocks: dict[str, dict[Block, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name, block, digest in chain.from_iterable(parts):
        blocks[name][block].add(digest)
    merged: dict[str, int | None] = {}
    for name, shape in shapes.items():
        digests = blocks[name]
        if sum(block.rows * block.columns for block in digests) != prod(shape):
            merged[name] = None
        elif any(len(copies) > 1 for copies in digests.values()):
            merged[name] = _TORN
        else:
            merged[name] = sum(chain.from_iterable(digests.values())) % 2**64
    return merged
