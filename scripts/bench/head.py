"""Measure peak memory and time of logprobs and entropy from hidden states, forward and backward.

    python scripts/bench/head.py [--dtype bfloat16] [--tiny] [--json FILE]

2,048 tokens, a hidden size of 896 and a vocabulary of 151,936 (Qwen2.5-0.5B), one thread: the head of the engine, with
and without keeping logits for the backward pass, beside the plain way, log_softmax over all logits at once. Each runs
in a process of its own; extra memory is its largest resident size above that before the first pass.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from timing import make_parser, write_figures

PARSER = make_parser(__doc__)
PARSER.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
PARSER.add_argument("--kind", help=argparse.SUPPRESS)
OPTIONS = PARSER.parse_args()
TOKENS, HIDDEN, VOCAB = (512, 64, 20_000) if OPTIONS.tiny else (2048, 896, 151_936)
ROUNDS = 1 if OPTIONS.tiny else 3


def measure_kind(kind: str, dtype: str) -> dict[str, float]:
    """Return the seconds of the fastest pass, and the extra megabytes, of one kind of head in this process."""
    import torch
    import torch.distributed as dist

    from engines.megatron.logprobs import score_tokens

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(getattr(torch, dtype)).requires_grad_()
    weight = (0.05 * torch.randn(VOCAB, HIDDEN, generator=generator)).to(getattr(torch, dtype)).requires_grad_()
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)

    def score():
        if kind == "full softmax":
            log_p = (hidden @ weight.T).float().log_softmax(-1)
            return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        settings = dict(temperature=1.0, vocab=VOCAB, keep_logits=kind == "logits kept", group=dist.group.WORLD)
        out = score_tokens(hidden, weight, target, **settings)
        return out.logprobs, out.entropy

    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
    start_megabytes, seconds = read_memory("VmRSS"), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        logprobs, entropy = score()
        (logprobs.sum() + 0.01 * entropy.sum()).backward()
        seconds.append(time.perf_counter() - start)
        hidden.grad = weight.grad = None
    return {"seconds": min(seconds), "megabytes": read_memory("VmHWM") - start_megabytes}


def read_memory(field: str) -> float:
    """Return the megabytes that this process has in memory now (VmRSS) or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    if OPTIONS.kind:
        print(json.dumps(measure_kind(OPTIONS.kind, OPTIONS.dtype)))
        return
    figures = {}
    for kind in ("full softmax", "logits kept", "logits made again"):
        command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--kind", kind]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        figures[kind] = json.loads(process.stdout.splitlines()[-1])
    full, rows = figures["full softmax"], []
    for kind, numbers in figures.items():
        memory, seconds = (numbers[name] / full[name] for name in ("megabytes", "seconds"))
        print(f"{kind:18s} {numbers['megabytes']:7.0f} MB {memory:5.2f}x  {numbers['seconds']:6.2f} s {seconds:5.2f}x")
        row = {"head": kind, "extra MB": numbers["megabytes"], "MB of full softmax": memory}
        rows.append(row | {"seconds": numbers["seconds"], "seconds of full softmax": seconds})
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
