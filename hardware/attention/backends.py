"""The capability table's rows of each attention backend: what it does with each rule, in each layout.

Facts are from the backends' sources and documentation, as named at each; where ``evidence`` says "executed" a test
runs the backend and compares it with the oracle.
"""

from collections.abc import Iterable

from hardware.attention.cell import Cell, Evidence
from hardware.attention.rules import RULES

_MASKS = tuple(rule for rule in RULES if rule != "state")
"""Rules of layers that have attention."""

Rows = dict[tuple[str, bool], dict[str, Cell]]


def _all(cell: Cell, rules: Iterable[str] = _MASKS) -> dict[str, Cell]:
    return dict.fromkeys(rules, cell)


def _no(why: str, nearest: str, has_stand_in: bool = True) -> Cell:
    return Cell(False, why, nearest, has_stand_in=has_stand_in)


def _mask(how: str, evidence: Evidence) -> Cell:
    return Cell(True, how, composes=True, evidence=evidence)


def _said(how: str, evidence: Evidence) -> Cell:
    return Cell(True, how, evidence=evidence)


_CP_CALLS = (
    "keys gathered over the ranks, then two calls, low and high chunks, each bottom-right against its own prefix"
)


def _rows(bshd: dict, thd: dict, bshd_cp: dict, thd_cp: dict) -> Rows:
    no_state = {"state": _no("attention carries no state from token to token", "torch_delta", has_stand_in=False)}
    rows = {("bshd", False): bshd, ("thd", False): thd, ("bshd", True): bshd_cp, ("thd", True): thd_cp}
    return {place: no_state | cells for place, cells in rows.items()}


def _states(how: str, evidence: Evidence) -> Rows:
    no_mask = _all(_no("a state hears all of the past of its sequence", "a backend of attention", has_stand_in=False))
    cells = no_mask | {"state": _said(how, evidence)}
    gathered = no_mask | {"state": _said(f"tokens gathered over the ranks; {how}", evidence)}
    return _rows(cells, cells, gathered, gathered)


def _torch_sdpa() -> Rows:
    """torch 2.13. ``is_causal`` is top-left; a bool mask keeps where True; both together differ by kernel."""
    rows = _all(_mask("bool mask for each sequence of a group, True keeps", "executed"))
    causal = {"causal": _mask("is_causal over right-padded rows, no mask", "executed")}
    groups = {"causal": _mask("one call for each group of sequences of like length, is_causal", "executed")}
    gathered = _all(_mask("keys gathered over the ranks, bool mask for each group, True keeps", "executed"))
    return _rows(rows | causal, rows | groups, gathered, gathered)


def _torch_varlen() -> Rows:
    """torch 2.11 to 2.14 ``varlen_attn``: int32 cu_seqlens and a window, fp16 and bf16, an accelerator.

    Under every rule a query sees one interval of keys, which runs of queries and a window can say.
    """
    runs = "cu_seqlens, a run of queries with the keys up to its end; those that see the future in a second call"
    alone = _all(_mask(runs, "emulated")) | {"causal": _mask("cu_seqlens, window (-1, 0)", "emulated")}
    gathered = _all(_mask(f"keys gathered over the ranks, low and high chunks as runs; {runs}", "emulated"))
    return _rows(alone, alone, gathered, gathered)


_NPU_MODES = {
    "images": "npu_mode1 in bshd",
    "prefix": "npu_mode1 in bshd",
    "chunk": "npu_mode1",
    "window": "npu_mode4",
    "causal": "npu_mode2",
    "full": "npu_mode1",
}
"""Rule -> the sparse mode of ``npu_fusion_attention`` that honours it."""
_NPU_CP_MODES = {"causal": "npu_mode3", "window": "npu_mode4"}
"""Rules that the NPU honours in both layouts under context parallelism."""


def _npu(mode: int) -> Rows:
    """``npu_fusion_attention`` (op-plugin documentation). True blocks; mask None is full attention in every mode."""

    def row(cp: bool, cells: dict[str, Cell]) -> dict[str, Cell]:
        other = {rule: _no(f"sparse_mode {mode} does not compute it", _NPU_MODES[rule]) for rule in _MASKS}
        if cp:
            nearest, why = _NPU_CP_MODES, "not shown to be right under context parallelism"
            other = {rule: _no(why, nearest.get(rule, "npu_mode1 in bshd")) for rule in _MASKS}
        return other | cells

    triangle = "2048 x 2048 upper triangle, True blocks; mask None would be full attention"
    lengths = "; cumulative lengths as a list of ints"
    if mode == 1:
        bshd = _all(_mask("[b, 1, s, s] mask, True blocks", "emulated"))
        bshd_cp = _all(_mask("[b, 1, s, cp * s] mask of the rank's own queries, True blocks", "emulated"))
        thd = _all(_mask("[max s, max s] mask for all sequences, True blocks" + lengths, "emulated"))
        thd["full"] = _no("tokens would see the padding that the lengths cover", "npu_mode1 in bshd")
        thd |= _all(_no("a pack has one mask for all of its sequences", "npu_mode1 in bshd"), ("images", "prefix"))
        return _rows(bshd, thd, bshd_cp, row(True, {}))
    rule, how = "causal", triangle
    if mode == 4:
        rule, how = "window", triangle + ", pre_tockens count_tokens_before(w), next_tockens 0"
    cp = {rule: _said(f"{_CP_CALLS}; {how}", "emulated")} if mode in (3, 4) else {}
    return _rows(
        row(False, {rule: _said(how, "emulated")}),
        row(False, {rule: _said(how + lengths, "emulated")}),
        row(True, cp),
        row(True, cp),
    )


BACKENDS: dict[str, Rows] = {
    "torch_sdpa": _torch_sdpa(),
    "torch_varlen": _torch_varlen(),
    # fla-core 0.6.0 ``chunk_gated_delta_rule``: int64 cu_seqlens over one row, fp16 and bf16, states in fp32.
    "fla_delta": _states(
        "cu_seqlens, a run up to where others go on from it; these in a next call, its final state as initial_state",
        "emulated",
    ),
    # The gated delta rule and its convolution in torch (``hardware.attention.delta_rule``).
    "torch_delta": _states(
        "states and convolutions begin anew where the MaskSpec says that a sequence begins, and after its prompt's",
        "executed",
    ),
    **{f"npu_mode{mode}": _npu(mode) for mode in (1, 2, 3, 4)},
}
"""Backends that a platform calls; docs/masks.md has what is known of others."""
