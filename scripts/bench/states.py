"""Measure the gated delta rule, forward and backward, against transformers' in torch, which pads and batches.

    python scripts/bench/states.py [--rounds 5] [--tiny] [--json FILE]

2,048 tokens by 8 key heads and 16 value heads of 64: one sequence, sixteen equal ones, ten of mixed lengths.
transformers computes sequences of one length as a batch, and others one after another. CPU-seconds of one thread are
medians, the ways in turns. MB are the most that autograd holds for the backward pass.
"""

import statistics
import time
from collections.abc import Callable

import torch
from timing import make_parser, write_figures
from torch import Tensor

from engines.probes.saved_bytes import SavedBytes, find_place
from hardware.attention.delta_rule import TAIL, DeltaPlan, delta_rule
from hardware.attention.mask_spec import MaskSpec

PARSER = make_parser(__doc__)
PARSER.add_argument("--rounds", type=int, default=5)
OPTIONS = PARSER.parse_args()
TOKENS, KEY_HEADS, RATIO, DIM = (96, 2, 2, 8) if OPTIONS.tiny else (2048, 8, 2, 64)
SHAPES = {
    "one": (TOKENS,),
    "sixteen equal": (TOKENS // 16,) * 16,
    "ten mixed": tuple(TOKENS * share // 96 for share in (1, 2, 3, 5, 6, 8, 11, 15, 19, 26)),
}
"""Lengths of the sequences."""


def draw(tokens: int) -> tuple[Tensor, ...]:
    """Draw queries, keys, values, decay and beta of tokens in a row, each ``[tokens, heads, ...]``."""
    generator = torch.Generator().manual_seed(0)
    heads = KEY_HEADS, KEY_HEADS, KEY_HEADS * RATIO
    wide = [torch.randn(tokens, each, DIM, generator=generator) for each in heads]
    decay, beta = (torch.rand(tokens, KEY_HEADS * RATIO, generator=generator) for _ in range(2))
    return *(x.requires_grad_() for x in (*wide, -decay)), beta.requires_grad_()


def run_ours(inputs: tuple[Tensor, ...], lengths: tuple[int, ...]) -> Tensor:
    """Compute all sequences as one pack: ``[tokens, value heads, dim]``."""
    plan = DeltaPlan.build(MaskSpec("thd", lengths, lengths))
    query, key, value, decay, beta = (plan.cut(x.flatten(1))[:, TAIL:].unflatten(-1, x.shape[1:]) for x in inputs)
    value, decay, beta = (x.unflatten(2, (KEY_HEADS, RATIO)) for x in (value, decay, beta))
    return plan.join(delta_rule(query, key, value, decay, beta, plan)).flatten(1, 2)


def run_transformers(inputs: tuple[Tensor, ...], lengths: tuple[int, ...]) -> Tensor:
    """Compute the sequences of a length together, as a batch, and those of other lengths one by one."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    batch = len(lengths) if len(set(lengths)) == 1 else 1
    outs = []
    for parts in zip(*(x.split([sum(lengths)] if batch > 1 else list(lengths)) for x in inputs), strict=True):
        rows = [x.unflatten(0, (batch, -1)) for x in parts]
        query, key = (x.repeat_interleave(RATIO, dim=2) for x in rows[:2])  # as its layer does
        out, _ = torch_chunk_gated_delta_rule(query, key, *rows[2:], use_qk_l2norm_in_kernel=True)
        outs.append(out.flatten(0, 1))
    return torch.cat(outs)


def measure(lengths: tuple[int, ...]) -> dict[str, float]:
    """Measure both ways in turns."""
    ways: dict[str, Callable] = {"ours": run_ours, "transformers'": run_transformers}
    inputs, seconds, figures, results = draw(sum(lengths)), {way: [] for way in ways}, {}, []
    for number in range(OPTIONS.rounds + 1):  # the first round warms up, and counts bytes
        for way, run in ways.items():
            saved, start = SavedBytes({find_place(x) for x in inputs}), time.process_time()
            if number:
                run(inputs, lengths).square().sum().backward()
                seconds[way].append(time.process_time() - start)
            else:
                with saved.counting():
                    out = run(inputs, lengths)
                results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
                figures[f"{way} MB"] = saved.most / 2**20
    medians = {f"{way} CPU s": statistics.median(each) for way, each in seconds.items()}
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))
    ratio = {"ours / transformers'": medians["ours CPU s"] / medians["transformers' CPU s"], "apart": apart}
    return medians | ratio | figures


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, lengths in SHAPES.items():
        figures = measure(lengths)
        print(f"{name:14s}  {'  '.join(f'{key} {value:.4g}' for key, value in figures.items())}", flush=True)
        rows.append({"sequences": name} | figures)
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
