"""``npu_grouped_matmul`` of one ``x`` and one ``weight`` on a CPU: its contract, and its products group by group.

Sources: the page of torch-npu 2.10.0.post4 (``torch_npu/_op_plugin_docs.py`` of its wheel), which leaves ``group_type``
2 out; op-plugin's host code, which takes it; CANN's host code, aclnn_grouped_matmul.cpp, whose page
(aclnnGroupedMatmulV5) describes it.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hardware.attention.contract import NotEmulatedError, Requirement, Source, check_call
from hardware.npu.limits import MAX_GROUPED_WIDTH, MAX_GROUPS

_D = Source("torch-npu documentation", refuses=False)
_H, _A = Source("op-plugin host code"), Source("CANN host code")
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_COMPUTED = {"x", "weight", "group_list", "split_item", "group_type", "group_list_type", "act_type"}
_Rule = Requirement[SimpleNamespace]


def _is_transposed(x: Tensor) -> bool:
    """Tell whether CANN takes ``x`` for the transposed view of a contiguous tensor."""
    return x.stride(-2) == 1 and x.stride(-1) == x.shape[-2] and x.shape[-2:].numel() > 1


def _measure_widest(call: SimpleNamespace) -> int:
    """Measure the longest last dimension in memory."""
    return max(x.shape[-2 if _is_transposed(x) else -1] for x in (call.x, call.weight))


REQUIREMENTS: tuple[_Rule, ...] = (
    _Rule("group_type", _H, lambda c: c.group_type in (0, 2), lambda c: f"group_type is 0 or 2, got {c.group_type}"),
    _Rule("split_item", _A, lambda c: c.split_item in (2, 3), lambda c: f"split_item is 2 or 3, got {c.split_item}"),
    _Rule(
        "group_list",
        _A,
        lambda c: c.group_list is not None and c.group_list.dtype == torch.int64 and c.group_list.dim() == 1,
        lambda c: "group_list is [groups] int64",
    ),
    _Rule(
        "dtype",
        _D,
        lambda c: c.x.dtype in _TYPES and c.weight.dtype == c.x.dtype,
        lambda c: f"x and weight are both fp16, bf16 or fp32, got {c.x.dtype} and {c.weight.dtype}",
    ),
    _Rule(
        "rank",
        _A,
        lambda c: (c.x.dim(), c.weight.dim()) == (2, 2 if c.group_type else 3),
        lambda c: f"x is 2-D and weight 3-D, 2-D with group_type 2, got {c.x.dim()} and {c.weight.dim()}",
    ),
    _Rule(
        "sizes",
        _A,
        lambda c: c.x.shape[1] == c.weight.shape[-2] and (c.group_type == 2 or len(c.group_list) == len(c.weight)),
        lambda c: f"x {tuple(c.x.shape)} x weight {tuple(c.weight.shape)} in {len(c.group_list)} groups do not fit",
    ),
    _Rule(
        "most groups",
        _D,
        lambda c: len(c.group_list) <= MAX_GROUPS,
        lambda c: f"at most {MAX_GROUPS} groups, got {len(c.group_list)}",
    ),
    _Rule(
        "layout",
        _A,
        lambda c: _is_transposed(c.x) == (c.group_type == 2) and not (c.group_type == 2 and _is_transposed(c.weight)),
        lambda c: f"x is a transposed view with group_type 2, where weight is none, and none with 0: {c.x.stride()}",
    ),
    _Rule(
        "widths",
        _A,
        lambda c: _measure_widest(c) <= MAX_GROUPED_WIDTH,
        lambda c: f"the last dimension in memory is at most {MAX_GROUPED_WIDTH}, got {_measure_widest(c)}",
    ),
    _Rule(
        "something to multiply",
        _A,
        lambda c: c.x.numel() > 0 and c.weight.numel() > 0,
        lambda c: "of empty tensors nothing is computed: the output is whatever was there",
        silent=True,
    ),
    _Rule(
        "ends",
        _D,
        # They never fall, from 0 to the size of the grouped dimension.
        lambda c: (
            sorted(ends := [0, *c.group_list.tolist()]) == ends and ends[-1] == c.x.shape[1 if c.group_type else 0]
        ),
        lambda c: f"group_list has ends that add up to the grouped size of x {tuple(c.x.shape)}: {c.group_list}",
        silent=True,
    ),
    _Rule(
        "derivative",
        Source("torch-npu's derivatives", refuses=False),
        lambda c: not (torch.is_grad_enabled() and (c.x.requires_grad or c.weight.requires_grad)),
        lambda c: "the operator has no derivative: x and weight would get no gradient",
        silent=True,
    ),
)


def multiply_groups(arguments: dict[str, Any]) -> list[Tensor]:
    """Check a call of ``npu_grouped_matmul`` and compute it.

    Args:
        arguments: all arguments of its schema, by name.

    Raises:
        RefusedError, SilentError: the call breaks a requirement.
        NotEmulatedError: a device computes the call and this emulator does not.
    """
    unknown = [name for name, value in arguments.items() if value is not None and name not in _COMPUTED]
    unknown += [name for name in ("x", "weight") if len(arguments[name]) != 1]
    unknown += [name for name in ("group_list_type", "act_type") if arguments[name] != 0]
    if unknown or arguments["group_type"] == -1:
        raise NotEmulatedError(f"npu_grouped_matmul, emulated: {unknown or ['group_type -1']} is not computed")
    (x,), (weight,) = arguments["x"], arguments["weight"]
    call = SimpleNamespace(**arguments | {"x": x, "weight": weight})
    check_call("npu_grouped_matmul", REQUIREMENTS, call)
    ends = call.group_list.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends)]
    left, right = x.float(), weight.float()
    if call.group_type == 0:
        product = torch.cat([left[group] @ each for group, each in zip(groups, right, strict=True)])
    else:
        product = torch.stack([left[:, group] @ right[group] for group in groups])
    return [product.to(x.dtype)]
