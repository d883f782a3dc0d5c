"""The capability table's rows of every attention backend: each rule in each layout, honoured or refused.

Facts are from the backends' sources and documentation, as named at each; where ``evidence`` says "executed" a test
runs the backend and compares it with the oracle.
"""

from collections.abc import Iterable

from hardware.attention.cell import Cell, Evidence
from hardware.attention.rules import RULES

Rows = dict[tuple[str, bool], dict[str, Cell]]


def _all(cell: Cell, rules: Iterable[str] = RULES) -> dict[str, Cell]:
    return dict.fromkeys(rules, cell)


def _no(why: str, nearest: str, evidence: Evidence = "untested") -> Cell:
    return Cell(False, why, nearest, evidence=evidence)


def _each(why: str, nearest: dict[str, str]) -> dict[str, Cell]:
    return {rule: _no(why, name) for rule, name in nearest.items()}


def _mask(how: str, evidence: Evidence = "untested") -> Cell:
    return Cell(True, how, composes=True, evidence=evidence)


def _said(how: str, evidence: Evidence = "untested") -> Cell:
    return Cell(True, how, evidence=evidence)


_UNPROVEN = "not shown to be right under context parallelism"
_CP_CALLS = (
    "keys gathered over the ranks, then two calls, low and high chunks, each bottom-right against its own prefix"
)


def _rows(bshd: dict, thd: dict, bshd_cp: dict, thd_cp: dict) -> Rows:
    return {("bshd", False): bshd, ("thd", False): thd, ("bshd", True): bshd_cp, ("thd", True): thd_cp}


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


def _flash_varlen() -> Rows:
    """flash-attn 2.1 and later, its varlen kernel: int32 cu_seqlens, fp16 and bf16, an accelerator."""
    no_mask = _no("flash-attention's varlen kernel takes lengths and a window, and no mask", "torch_varlen")
    thd = _all(no_mask) | {
        "full": _no("tokens would see the padding between their sequence and the next", "te_padding, or torch_varlen"),
        "causal": _said("cu_seqlens, window (-1, 0)"),
        "window": _said("cu_seqlens, window (count_tokens_before(w), 0)"),
    }
    cp = _all(_no(_UNPROVEN, "torch_varlen")) | {"causal": _said(_CP_CALLS)}
    only_thd = _all(_no("flash-attention's varlen kernel takes packed sequences alone", "thd, or torch_varlen"))
    return _rows(only_thd, thd, only_thd, cp)


def _flex_attention() -> Rows:
    """torch 2.13. Runs forward on a CPU and raises in backward there."""
    rule = _all(_mask("keys gathered over the ranks, BlockMask of the rule over segments and positions"))
    forward = _all(_mask("BlockMask of the rule over segments and positions", "executed"))
    return _rows(forward, forward, rule, rule)


_TE_RING = (
    "cp_comm_type all_gather, or the p2p ring with pad_between_seqs=True: without it padding at an end is computed as "
    "tokens (TransformerEngine issues 3331, 1930), and with it no kernel takes heads of 256 (Megatron-LM PR 7417)"
)
"""TransformerEngine 2.20.2, packs under context parallelism."""
_TE_GATHER = "cp_comm_type all_gather, which takes windows; the p2p ring does not"
_TE_PACKED = dict.fromkeys(RULES, "torch_varlen, or flex_attention") | {
    "causal": "te_padding_causal",
    "window": "te_padding_causal",
    "full": "te_padding",
}
_TE_THD = _each("TransformerEngine raises for this mask type in thd", _TE_PACKED)
_TE_ROWS_CP = _each("no kernel for bshd with padding under CP", _TE_PACKED | {"causal": "te_causal"})
_TE_IGNORED = _no("the mask would be ignored (Megatron-LM issue 2357)", "torch_varlen, te_arbitrary or flex_attention")
_TE_DENSE = "TransformerEngine's unfused kernel is the only one that reads a dense mask, and it takes bshd without CP"


def _te_no_mask() -> Rows:
    """TransformerEngine ``no_mask``: full attention; it ignores any mask."""
    pads = _no("no_mask is full attention over padding too, and ignores a mask", "te_padding")
    bshd = _all(_no("no_mask is full attention, and ignores a mask", "te_causal, or te_arbitrary")) | {"full": pads}
    return _rows(bshd, _TE_THD, bshd, _TE_THD)


def _te_causal() -> Rows:
    """TransformerEngine ``causal``: attention_mask is never read; right padding is never seen by a real token."""
    full = {"full": _no("causal never sees the future", "te_padding")}
    causal = {"causal": _said("mask None")}
    window = {"window": _said("mask None, window_size (count_tokens_before(w), 0)")}
    cp = {
        "causal": _said("mask None, its own ring over zigzag chunks"),
        "window": _said(f"mask None, window_size (count_tokens_before(w), 0); {_TE_GATHER}"),
    }
    refused = _all(_TE_IGNORED) | full
    return _rows(refused | causal | window, _TE_THD, refused | cp, _TE_THD)


def _te_padding() -> Rows:
    """TransformerEngine ``padding``: both ways within a sequence."""
    refused = _all(_no("padding sees both ways within a sequence", "te_padding_causal, or te_arbitrary"))
    bshd = refused | {"full": _said("[b, 1, 1, s] mask, True blocks")}
    thd = refused | {"full": _said("int32 cu_seqlens, and cu_seqlens_padded beside them")}
    cp = refused | {"full": _said(f"cu_seqlens and cu_seqlens_padded, zigzag within each sequence; {_TE_RING}")}
    return _rows(bshd, thd, _TE_ROWS_CP, cp)


def _te_padding_causal() -> Rows:
    """TransformerEngine ``padding_causal``. Equal padded and real cu_seqlens would make padding real tokens."""
    refused = _all(_TE_IGNORED) | {"full": _no("padding_causal never sees the future", "te_padding")}
    bshd = refused | {
        "causal": _said("[b, 1, 1, s] mask, True blocks"),
        "window": _said("[b, 1, 1, s] mask, True blocks, window_size (count_tokens_before(w), 0)"),
    }
    thd = refused | {
        "causal": _said("mask None, int32 cu_seqlens, and cu_seqlens_padded beside them"),
        "window": _said("mask None, cu_seqlens and cu_seqlens_padded, window_size (count_tokens_before(w), 0)"),
    }
    cp = refused | {
        "causal": _said(f"cu_seqlens and cu_seqlens_padded, zigzag within each sequence; {_TE_RING}"),
        "window": _said(f"cu_seqlens and cu_seqlens_padded, window_size (count_tokens_before(w), 0); {_TE_GATHER}"),
    }
    return _rows(bshd, thd, _TE_ROWS_CP, cp)


def _te_bottom_right(padding: bool) -> Rows:
    """TransformerEngine ``*_bottom_right``: the last query sees the last key. Raises with its own cp_group."""
    refused = _all(_TE_IGNORED) | {"full": _no("never sees the future", "te_padding")}
    lengths = "cu_seqlens and cu_seqlens_padded" if padding else "mask None"
    alone = refused | {
        "causal": _said(f"{lengths}; the same as top-left where queries are as many as keys"),
        "window": _said(f"{lengths}, window_size (count_tokens_before(w), 0)"),
    }
    cp = refused | {"causal": _said(f"{_CP_CALLS}; without its cp_group"), "window": _no(_UNPROVEN, "no CP")}
    thd, thd_cp = (alone, cp) if padding else (_TE_THD, _TE_THD)
    return _rows(alone, thd, cp, thd_cp)


def _te_arbitrary() -> Rows:
    """TransformerEngine ``arbitrary``: a dense mask, for one kernel of quadratic memory."""
    refused = _all(_no(_TE_DENSE, "te_padding_causal, or flex_attention"))
    return _rows(_all(_mask("[b, 1, s, s] mask, True blocks")), refused, refused, refused)


def _te_post_scale_bias() -> Rows:
    """TransformerEngine ``post_scale_bias``: numbers added to the scores; raises with a finite window."""
    how = "[b, 1, s, s] added to the scores, window_size unlimited"
    thd = _all(_no("a pack would need numbers for every pair of its tokens", "te_padding_causal, or flex_attention"))
    cp = _all(_no(f"{_UNPROVEN} (it takes the p2p ring alone)", "te_post_scale_bias without CP, or flex_attention"))
    return _rows(_all(_mask(how)), thd, cp, cp)


def _megatron_local() -> Rows:
    """megatron-core 0.16.1 ``DotProductAttention``: a mask replaces causal, a window replaces the mask."""
    dense = _all(_mask("[b, 1, s, s] mask, True blocks, attn_mask_type arbitrary", "executed"))
    bshd = dense | {"causal": _mask("mask None, attn_mask_type causal", "executed")}
    packed = _all(_no("packed_seq_params raises", "torch_sdpa", "executed"))
    cp = _all(_no("its constructor raises for context_parallel_size above 1", "torch_sdpa", "executed"))
    return _rows(bshd, packed, cp, cp)


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
        other = {rule: _no(f"sparse_mode {mode} does not compute it", _NPU_MODES[rule]) for rule in RULES}
        if cp:
            other = _each(_UNPROVEN, dict.fromkeys(RULES, "npu_mode1 in bshd") | _NPU_CP_MODES)
        return other | cells

    triangle = "2048 x 2048 upper triangle, True blocks; mask None would be full attention"
    lengths = "; cumulative lengths as a list of ints"
    if mode in (0, 1):
        bshd = _all(_mask("[b, 1, s, s] mask, True blocks", "emulated"))
        bshd_cp = _all(_mask("[b, 1, s, cp * s] mask of the rank's own queries, True blocks", "emulated"))
        if mode == 0:
            skips = _no("with next_tockens 0 it skips blocks above the diagonal that the mask keeps", "npu_mode1")
            bshd |= _all(skips, ("full", "images", "prefix"))
        shared = _all(
            _mask("[max s, max s] mask for all sequences, True blocks" + lengths, "emulated"),
            ("causal", "window", "chunk"),
        )
        shared["full"] = _no("tokens would see the padding that the lengths cover", "npu_mode1 in bshd")
        each = _no("a pack has one mask for all of its sequences", "npu_mode1 in bshd")
        thd = shared | _all(each, ("images", "prefix"))
        return _rows(row(False, bshd), row(False, thd), row(True, bshd_cp if mode == 1 else {}), row(True, {}))
    if mode in (2, 3):
        bshd = {"causal": _said(triangle, "emulated")}
        thd = {"causal": _said(triangle + lengths, "emulated")}
        cp = {"causal": _said(f"{_CP_CALLS}; {triangle}", "emulated")} if mode == 3 else {}
        return _rows(row(False, bshd), row(False, thd), row(True, cp), row(True, cp))
    if mode == 4:
        band = triangle + ", pre_tockens count_tokens_before(w), next_tockens 0"
        cp = {"window": _said(f"{_CP_CALLS}; {band}", "emulated")}
        return _rows(
            row(False, {"window": _said(band, "emulated")}),
            row(False, {"window": _said(band + lengths, "emulated")}),
            row(True, cp),
            row(True, cp),
        )
    if mode in (5, 6):
        mask = "[b, 1, s, s] mask" if mode == 5 else "3072 x 2048 compressed mask"
        prefix = {"prefix": _said(f"{mask}, True blocks, and the prefix of each sequence", "emulated")}
        why = "it raises in TND" if mode == 5 else "not shown to be right in TND"
        never = {"prefix": _no(why, "npu_mode1 in bshd")}
        return _rows(row(False, prefix), row(False, never), row(True, {}), row(True, {}))
    only = _each("sparse_mode 7 and 8 are for packs whose causal call is cut in several", _NPU_MODES)  # TND alone
    return _rows(only, only, row(True, {}), row(True, {}))


BACKENDS: dict[str, Rows] = {
    "torch_sdpa": _torch_sdpa(),
    "torch_varlen": _torch_varlen(),
    "flash_varlen": _flash_varlen(),
    "flex_attention": _flex_attention(),
    "te_no_mask": _te_no_mask(),
    "te_causal": _te_causal(),
    "te_padding": _te_padding(),
    "te_padding_causal": _te_padding_causal(),
    "te_causal_bottom_right": _te_bottom_right(padding=False),
    "te_padding_causal_bottom_right": _te_bottom_right(padding=True),
    "te_arbitrary": _te_arbitrary(),
    "te_post_scale_bias": _te_post_scale_bias(),
    "megatron_local": _megatron_local(),
    **{f"npu_mode{mode}": _npu(mode) for mode in range(9)},
}
