"""``torch.ops.npu.npu_fusion_attention`` on a CPU: the operator's own schema, every documented rule, its arithmetic.

A call is parsed by torch.library from the schema of the torch-npu that the npu profile names, so that a wrong keyword,
or a tensor where a list of ints belongs, fails as it does on the device. ``contract.py`` then checks it, and is
strict: what the device would compute wrong in silence raises here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hardware.attention.contract import NotEmulatedError
from hardware.npu.emulator.contract import check
from hardware.npu.emulator.grouped_matmul import multiply_groups
from hardware.npu.emulator.layer_operators import REQUIREMENTS, compute
from hardware.npu.emulator.schemas import SCHEMAS
from hardware.npu.kernel_call import Call

OPERATOR = "npu_fusion_attention"
_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Register the operators for tensors of the CPU in this process; a second call does nothing."""
    if _LIBRARIES:
        return
    functions: dict[str, Callable[[dict], Any]] = {OPERATOR: _fusion_attention, "npu_grouped_matmul": multiply_groups}
    functions |= {name: partial(compute, name) for name in REQUIREMENTS}
    for name, function in functions.items():
        _LIBRARIES.append(_register(name, SCHEMAS[name], function))


def _register(name: str, schema: str, function: Callable[[dict], Any]) -> torch.library.Library:
    """Register an operator whose function takes all of its schema's arguments by name."""
    is_real = hasattr(torch.ops.npu, name)
    library = torch.library.Library("npu", "IMPL" if is_real else "FRAGMENT")
    if not is_real:
        library.define(schema)
    declared = torch._C.parse_schema(schema).arguments

    def call(*args, **kwargs):
        given = dict(zip((argument.name for argument in declared), args)) | kwargs
        return function({argument.name: argument.default_value for argument in declared} | given)

    for key in ("CPU", "AutogradCPU") if is_real else ("CompositeImplicitAutograd",):
        library.impl(name, call, key)
    return library


def _fusion_attention(arguments: dict) -> tuple:
    call = Call(arguments)
    if call.sparse_mode in (5, 6, 7, 8) or (call.sparse_mode == 0 and call.atten_mask is not None):
        raise NotEmulatedError(
            f"npu_fusion_attention, emulated: sparse_mode {call.sparse_mode} with a mask is not computed; give 1 to 4"
        )
    check(call)
    unknown = [name for name in ("pse", "sink", "dropout_mask") if arguments[name] is not None]
    if unknown or call.keep_prob < 1:
        raise NotEmulatedError(f"npu_fusion_attention, emulated: {unknown or ['keep_prob below 1']} is not computed")
    groups = call.list_groups()
    outputs = [_attend(call, members) for members in groups.values()]
    if call.packed:
        rows = torch.cat([_locate_tokens(call.query_lengths, members) for members in groups.values()])
        out = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in outputs])[rows.argsort()]
        statistics = torch.full((*call.query.shape[:2], 8), torch.nan)
    else:
        order = torch.tensor([number for members in groups.values() for number in members])
        out = torch.cat(outputs)[order.argsort()]  # [B, N, S, D]
        statistics = torch.full((*out.shape[:3], 8), torch.nan)
        places = {"BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
        out = out.permute(places[call.input_layout])
        out = out.flatten(2) if "H" in call.input_layout else out
    return out.contiguous(), statistics, statistics.clone(), call.query.new_empty(0), 0, 0, 0


def _attend(call: Call, members: list[int]) -> Tensor:
    """Attend for sequences with one mask: ``[members, N, Sq, D]``."""
    see = call.compute_allowed(members[0])
    blind = ~see.any(-1, keepdim=True)
    query, key, value = (
        _take(call, tensor, lengths, members).float()
        for tensor, lengths in (
            (call.query, call.query_lengths),
            (call.key, call.key_lengths),
            (call.value, call.key_lengths),
        )
    )
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, see | blind, scale=call.scale, enable_gqa=grouped)
    return out.masked_fill(blind, 0.0).to(call.query.dtype)


def _locate_tokens(lengths: list[int], members: list[int]) -> Tensor:
    """Locate the tokens of some sequences of one length in a pack."""
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    return (starts[members][:, None] + torch.arange(lengths[members[0]])).flatten()


def _take(call: Call, tensor: Tensor, lengths: list[int], members: list[int]) -> Tensor:
    """Take the tokens of sequences of equal length: ``[members, N, S, D]``."""
    if call.packed:
        return tensor[_locate_tokens(lengths, members)].unflatten(0, (len(members), -1)).transpose(1, 2)
    if "H" in call.input_layout:
        tensor = tensor.unflatten(-1, (call.head_num if tensor is call.query else call.kv_heads, -1))
    places = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
    return tensor.permute(places[call.input_layout])[members]
