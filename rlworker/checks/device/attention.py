"""Check core attention against dense attention, for every rule, layout and context-parallel size."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from engines.megatron.layout import Layout
from hardware.attention.capabilities import find_backend
from hardware.attention.dense.oracle import compute_visible
from hardware.attention.inputs import AttentionInputs
from hardware.attention.mask_spec import MaskSpec, Sharing, expand_counts
from hardware.attention.rules import CAUSAL, Rule
from hardware.platform import Platform
from rlworker.checks.device.dense_attention import DIM, HEADS, KV_HEADS, dense_attention, find_image_blocks
from rlworker.checks.device.report import Device, DeviceFinding
from rlworker.checks.reference.huggingface import round_otherwise

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
DTYPES = (torch.float32, torch.bfloat16)
FACTOR = 8.0
"""Most that an output or gradient may differ from float64, as a multiple of what rounding makes of dense attention. A
fused kernel adds up in another order; a wrong mask makes thousands of times as much."""
_DRAWS = 4
"""Number of times that dense attention computes in the kernel's dtype, each with inputs that are rounded otherwise."""


@dataclass(frozen=True)
class Distance:
    """The largest difference of an output or a gradient of attention from dense attention in float64.

    Both numbers are shares of the reference's largest number, or of 1 if that is less: the drawn numbers are of that
    size, and a gradient may be what is left of some that cancel.

    Attributes:
        difference: of the kernel.
        rounding: of dense attention in the kernel's dtype, at least one unit in the last place; of gradients the
            largest of the three.
    """

    difference: float
    rounding: float

    @property
    def share(self) -> float:
        """The difference as a share of its limit; NaN if the difference is."""
        return self.difference / (FACTOR * self.rounding)


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
) -> list[Distance]:
    """Compare core attention with dense attention for every context-parallel rank, in one process that gathers by hand.

    Args:
        lengths: lengths of the sequences. kind: layout. rules: rule of each layer. layer: the layer to compare.
        slots: slots of a pack of fixed size; 0 fits it to the lengths. sharing: the sequences that begin alike.
        build_inputs: replaces the platform's own function.

    Returns:
        the distances of the output, and of the gradients of query, key and value.
    """
    layers = platform.load("layers", "hardware.megatron")
    device = device or torch.get_default_device()
    case = AttentionCase(lengths, rules[0] if len(rules) == 1 else rules[layer - 1], sharing)
    inputs, weight = case.draw()
    flats = [x.to(device, dtype).requires_grad_() for x in inputs]
    layouts = [
        Layout.build(lengths, kind, cp_rank=rank, cp=cp, slots=slots, sharing=sharing, device=device)
        for rank in range(cp)
    ]
    form = (lambda x: x.transpose(0, 1)) if kind == "bshd" else (lambda x: x[0])
    alike = case.take_held_tokens(flats)
    packed = [[layout.pack(x) for x in alike] for layout in layouts]
    gathered = [torch.cat([form(part[i]) for part in packed]) for i in (1, 2)]  # [cp * s, b, h, d], in thd [s, h, d]
    output = torch.zeros(weight.shape, device=device)
    for rank, layout in enumerate(layouts):
        spec = case.build_mask_spec(layout, rules)
        lowered = (build_inputs or platform.build_attention_inputs)(spec, make_no_rotation(layout, dtype, device))
        core = build_core(platform, layer, cp, rank)
        with patch.object(layers, "gather_keys_values", lambda key, value, group: gathered):
            out = core(*(form(x) for x in packed[rank]), None, packed_seq_params=lowered)
        output = output + layout.unpack(out.transpose(0, 1) if kind == "bshd" else out[None]).float()
    gradients = torch.autograd.grad((output * weight.to(device)).sum(), flats)
    return compute_dense(case, dtype).measure([output, *gradients])


@dataclass(frozen=True)
class AttentionCase:
    """Numbers to attend to, the same in every layout and size of context parallelism.

    Attributes:
        lengths: lengths of the sequences. rule: who sees whom. sharing: the sequences that begin alike.
    """

    lengths: tuple[int, ...]
    rule: Rule
    sharing: Sharing | None

    def draw(self) -> tuple[list[Tensor], Tensor]:
        """Draw query, key and value ``[N, h, d]``, and the weights ``[N, h * d]`` of the sum of outputs that is
        differentiated; float32, on the host."""
        generator = torch.Generator().manual_seed(0)
        tokens = sum(self.lengths)
        inputs = [torch.randn(tokens, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        return inputs, torch.randn(tokens, HEADS * DIM, generator=generator)

    def take_held_tokens(self, flats: list[Tensor]) -> list[Tensor]:
        """Replace each token that another one's slot holds by that one, without a gradient of its own."""
        holders = find_holding_tokens(self.lengths, self.sharing).to(flats[0].device)
        is_own = (holders == torch.arange(len(holders), device=holders.device))[:, None, None]
        return [torch.where(is_own, x, x.detach()[holders]) for x in flats]

    def build_mask_spec(self, layout: Layout, rules: tuple[Rule, ...]) -> MaskSpec:
        """Build the mask of a layout, with images and prefixes."""
        blocks = find_image_blocks(self.lengths)[find_holding_tokens(self.lengths, self.sharing)]
        prefixes = tuple(min(3 if self.sharing else 2 + i, n) for i, n in enumerate(self.lengths))
        return layout.build_mask_spec(rules, blocks, prefixes)

    def attend_densely(self, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
        """Compute the output ``[N, h * d]`` and the gradients of query, key and value by definition, in one pack."""
        layout = Layout.build(self.lengths, "thd", sharing=self.sharing)
        visible = compute_visible(self.build_mask_spec(layout, (self.rule,)))
        leaves = [x.clone().requires_grad_() for x in inputs]
        query, key, value = (layout.pack(x) for x in self.take_held_tokens(leaves))
        output = layout.unpack(dense_attention(query, key, value, see=visible))
        total = (output * weight.to(output.dtype)).sum()
        return [output.detach(), *torch.autograd.grad(total, leaves)]


@dataclass(frozen=True)
class DenseNumbers:
    """The output of dense attention for a case, and the gradients of query, key and value.

    Attributes:
        exact: in float64. rounding: of the output and of the gradients, as of ``Distance``.
    """

    exact: list[Tensor]
    rounding: tuple[float, float, float, float]

    def measure(self, results: list[Tensor]) -> list[Distance]:
        """Measure how far the results of a kernel are from float64."""
        differences = measure_differences(results, self.exact)
        return [Distance(difference, own) for difference, own in zip(differences, self.rounding, strict=True)]


@lru_cache(maxsize=64)
def compute_dense(case: AttentionCase, dtype: torch.dtype) -> DenseNumbers:
    """Compute dense attention on the host in float64, and several times in a kernel's dtype, for its rounding."""
    inputs, weight = case.draw()
    values = [x.to(dtype) for x in inputs]
    exact = case.attend_densely([x.double() for x in values], weight)
    draws = []
    for seed in range(_DRAWS):
        generator = torch.Generator().manual_seed(seed)
        moved = [round_otherwise(x, generator) for x in values]
        draws.append(measure_differences(case.attend_densely(moved, weight), exact))
    least = torch.finfo(dtype).eps
    outputs, *gradients = zip(*draws)
    of_gradients = max(least, *chain(*gradients))
    return DenseNumbers(exact, (max(least, *outputs), of_gradients, of_gradients, of_gradients))


def measure_differences(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Measure the largest difference of each tensor, as a share of its largest number or 1."""
    return [
        float((result.detach().cpu().double() - truth).abs().max()) / max(float(truth.abs().max()), 1.0)
        for result, truth in zip(results, exact, strict=True)
    ]


def find_holding_tokens(lengths: tuple[int, ...], sharing: Sharing | None) -> Tensor:
    """Return for each token the token whose slot holds it, ``[N]`` long: the token itself unless it is shared."""
    sequence, position = expand_counts(np.asarray(lengths))
    holder = MaskSpec("thd", lengths, lengths, sharing=sharing).find_holders(sequence, position)
    return torch.from_numpy((np.cumsum(lengths) - lengths)[holder] + position)


def check_attention(device: Device) -> list[DeviceFinding]:
    """Check every case that the platform's kernels support, with one finding for each rule and dtype."""
    findings = []
    for dtype, rule in product(DTYPES, RULES):
        cases, most, failures = 0, {"outputs": 0.0, "gradients": 0.0}, []
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
            output, *gradients = compare_attention(device.platform, lengths, kind, cp, (rule,), **settings)
            cases += 1
            shares = {"outputs": output.share, "gradients": float(np.max([g.share for g in gradients]))}
            most = {name: float(np.max([most[name], share])) for name, share in shares.items()}  # NaN is the larger
            if not all(share <= 1 for share in shares.values()):  # NaN is none
                failures.append(f"{kind}, cp={cp}, lengths {lengths}")
        if cases:
            text = f"{cases - len(failures)} of {cases} cases: outputs at most {most['outputs']:.2f}, gradients "
            text += f"{most['gradients']:.2f} of the limit, {FACTOR:.0f} times the rounding of dense attention"
            text += f"; not {failures[0]}" if failures else ""
            figures = {"cases": cases} | {f"{name} share of limit": share for name, share in most.items()}
            where = f"{rule}, {str(dtype).removeprefix('torch.')}"
            findings.append(device.make_finding("attention", where, not failures, text, figures))
    return findings
