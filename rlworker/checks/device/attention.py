"""Check core attention against dense attention, for every rule, layout and context-parallel size."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from engines.megatron.layout import Layout
from hardware.attention.capabilities import find_backend
from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec, Sharing, expand_counts
from hardware.attention.rules import CAUSAL, Rule
from hardware.platform import Platform
from rlworker.checks.device.dense_attention import DIM, HEADS, KV_HEADS, dense_attention, find_image_blocks
from rlworker.checks.device.report import Device, DeviceFinding

LENGTHS = ((5, 1, 0, 9, 9, 2), (1,), (16, 16), (3, 0, 7, 40, 41, 37, 38))
"""Lengths of packs: with an empty sequence, with one sequence, with equal lengths, and with many."""
SHARED = (
    ((12, 15, 9, 10, 21, 3), Sharing((0, 0, 0, 3, 3, 5), (0, 9, 9, 0, 7, 0))),
    ((10, 13, 19, 17, 20, 6), Sharing((0, 0, 1, 2, 0, 5), (0, 6, 9, 12, 4, 0))),
)
"""Packs with sequences that begin alike: two groups, one with a sequence without a token of its own; and a tree."""
RULES = (
    CAUSAL,
    Rule(causal=False),
    Rule(window=3),
    Rule(chunk=4),
    Rule(images=True),
    Rule(prefix=True),
    Rule(window=3, images=True),
    Rule(window=5, chunk=8, images=True, prefix=True),
)
KINDS, CP_SIZES = ("bshd", "thd"), (1, 2, 4)
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Largest difference of an output or gradient, relative to the reference's largest number or 1, whichever is larger."""

BuildInputs = Callable[[MaskSpec, tuple[Tensor, Tensor]], AttentionInputs]


def build_core(platform: Platform, layer: int = 1, cp: int = 1, cp_rank: int = 0, **sizes: int) -> Any:
    """Build a platform's core attention for one layer of one context-parallel rank.

    Args:
        layer: number of the layer. cp, cp_rank: size of context parallelism, and the rank in it.
        sizes: ``heads``, ``kv_heads`` and ``dim`` of a head; by default those of ``dense_attention``.
    """
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    heads, dim = sizes.get("heads", HEADS), sizes.get("dim", DIM)
    config = TransformerConfig(
        num_layers=2, hidden_size=heads * dim, num_attention_heads=heads, kv_channels=dim, attention_dropout=0.0
    )
    layer_of_model = platform.build_layer_spec(config).layer_specs[0].submodules
    group = SimpleNamespace(cp=SimpleNamespace(size=lambda: cp, rank=lambda: cp_rank))
    spec = layer_of_model.self_attention.submodules.core_attention
    return build_module(spec, config, layer, None, "self", pg_collection=group)


def make_no_rotation(layout: Layout, dtype: torch.dtype, device: torch.device, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Return ``(cos, sin)`` of no rotation, ``[1, b, s, dim]`` each."""
    shape = (1, *layout.shape, dim)
    return torch.ones(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


def compare_attention(
    platform: Platform,
    lengths: tuple[int, ...],
    kind: Any,
    cp: int,
    rules: tuple[Rule, ...],
    layer: int = 1,
    slots: int = 0,
    *,
    sharing: Sharing | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    build_inputs: BuildInputs | None = None,
) -> list[tuple[float, float]]:
    """Compare core attention with dense attention for every context-parallel rank, in one process that gathers by hand.

    Args:
        lengths: lengths of the sequences. kind: layout. rules: rule of each layer. layer: the layer to compare.
        slots: slots of a pack of fixed size; 0 fits it to the lengths. sharing: the sequences that begin alike.
        build_inputs: replaces the platform's own function.

    Returns:
        ``(largest difference, largest number of the reference)`` for the output, and for the gradients of query, key
            and value.
    """
    from hardware.megatron import layers

    device = device or torch.get_default_device()
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    drawn = [torch.randn(tokens, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)]
    flats = [x.to(device, dtype).requires_grad_() for x in drawn]
    exact = [x.detach().float().requires_grad_() for x in flats]
    sizes = {"cp": cp, "slots": slots, "sharing": sharing, "device": device}
    layouts = [Layout.build(lengths, kind, cp_rank=r, **sizes) for r in range(cp)]
    form = (lambda x: x.transpose(0, 1)) if kind == "bshd" else (lambda x: x[0])
    # A token that another one's slot holds is alike, without a gradient of its own.
    holders = find_holding_tokens(lengths, sharing).to(device)
    is_own = (holders == torch.arange(tokens, device=device))[:, None, None]
    alike = [[torch.where(is_own, x, x.detach()[holders]) for x in xs] for xs in (flats, exact)]
    packed, exact_packed = ([[layout.pack(x) for x in xs] for layout in layouts] for xs in alike)
    gathered = [torch.cat([form(part[i]) for part in packed]) for i in (1, 2)]  # [cp * s, b, h, d], in thd [s, h, d]
    keys, values = (torch.cat([part[i] for part in exact_packed], dim=1) for i in (1, 2))
    output, reference = (torch.zeros(tokens, HEADS * DIM, device=device) for _ in range(2))
    blocks = find_image_blocks(lengths)[find_holding_tokens(lengths, sharing)]
    prefixes = tuple(min(3 if sharing else 2 + i, n) for i, n in enumerate(lengths))
    for rank, layout in enumerate(layouts):
        spec = layout.build_mask_spec(rules, blocks, prefixes)
        inputs = (build_inputs or platform.build_attention_inputs)(spec, make_no_rotation(layout, dtype, device))
        core = build_core(platform, layer, cp, rank)
        with patch.object(layers, "gather_keys_values", lambda key, value, group: gathered):
            out = core(*(form(x) for x in packed[rank]), None, packed_seq_params=inputs)
        output = output + layout.unpack(out.transpose(0, 1) if kind == "bshd" else out[None]).float()
        see = spec.compute_visible(layer).to(device)
        reference = reference + layout.unpack(dense_attention(exact_packed[rank][0], keys, values, see))
    weight = torch.randn(tokens, HEADS * DIM, generator=generator).to(device)
    gradients = torch.autograd.grad((output * weight).sum(), flats)
    want = torch.autograd.grad((reference * weight).sum(), exact)
    pairs = [(output, reference), *zip(gradients, want, strict=True)]
    return [(float((a.float() - b).abs().max()), float(b.abs().max())) for a, b in pairs]


def find_holding_tokens(lengths: tuple[int, ...], sharing: Sharing | None) -> Tensor:
    """Return for each token the token whose slot holds it, ``[N]`` long: the token itself unless it is shared."""
    sequence, position = expand_counts(np.asarray(lengths))
    holder = MaskSpec("thd", lengths, lengths, sharing=sharing).find_holders(sequence, position)
    return torch.from_numpy((np.cumsum(lengths) - lengths)[holder] + position)


def check_attention(device: Device) -> list[DeviceFinding]:
    """Check every case that the platform's kernels support, with one finding for each rule and dtype."""
    findings = []
    for dtype, rule in product(LIMITS, RULES):
        cases, apart, failures = 0, {"outputs": 0.0, "gradients": 0.0}, []
        packs = [*product(KINDS, CP_SIZES, ((lengths, None) for lengths in LENGTHS))]
        packs += [*product(("thd",), CP_SIZES, SHARED)] if rule.causal else []
        for kind, cp, (lengths, sharing) in packs:
            try:
                backend, _ = find_backend(device.platform.attention_backends, kind, cp, rule)
            except ValueError:
                continue
            if sharing and backend == "npu_mode1":  # one mask for every sequence of a pack, each from its first key on
                continue
            settings: dict[str, Any] = {"sharing": sharing, "device": device.device, "dtype": dtype}
            pairs = compare_attention(device.platform, lengths, kind, cp, (rule,), **settings)
            output, *gradients = (difference / max(1.0, largest) for difference, largest in pairs)
            cases += 1
            apart = {"outputs": max(apart["outputs"], output), "gradients": max(apart["gradients"], *gradients)}
            if not max(output, *gradients) <= LIMITS[dtype]:
                failures.append(f"{kind}, cp={cp}, lengths {lengths}")
        if cases:
            text = f"{cases - len(failures)} of {cases} cases: outputs {apart['outputs']:.1e}, gradients "
            text += f"{apart['gradients']:.1e}, limit {LIMITS[dtype]:.0e}"
            text += f"; not {failures[0]}" if failures else ""
            figures = {"cases": cases} | {f"{name} difference": value for name, value in apart.items()}
            where = f"{rule}, {str(dtype).removeprefix('torch.')}"
            findings.append(device.make_finding("attention", where, not failures, text, figures))
    return findings
