"""Measure how long generalised advantage estimation takes for 1,024 sequences of 8,192 tokens, one thread.

    python scripts/bench/gae.py [--tiny] [--json FILE]

Every token counts, or each sequence begins with a prompt; beside it a loop over time, in the same run. Medians.
"""

import os
import sys

import torch
from timing import make_parser, measure_ms, write_figures

from engines.batch.batch import TrainBatch
from hardware.platforms import DEFAULT_PLATFORM, get_platform
from rlworker.algorithms.advantages import gae

OPTIONS = make_parser(__doc__).parse_args()
SEQUENCES, TOKENS, PROMPT, ROUNDS = (16, 64, 8, 1) if OPTIONS.tiny else (1024, 8192, 512, 9)
TOLERANCE = 1e-3
"""Largest difference from the loop: both are of float32, and add in another order."""


def make_batch(prompt: int) -> TrainBatch:
    """Make ``SEQUENCES`` of ``TOKENS`` targets each, of which the first ``prompt`` do not count."""
    generator = torch.Generator().manual_seed(0)
    n = SEQUENCES * TOKENS
    zeros, mask = torch.zeros(n, dtype=torch.long), torch.ones(SEQUENCES, TOKENS, dtype=torch.bool)
    mask[:, :prompt] = False
    columns = dict(values=torch.randn(n, generator=generator), rewards=torch.randn(SEQUENCES, generator=generator))
    return TrainBatch((TOKENS,) * SEQUENCES, zeros, zeros, zeros, mask.flatten(), **columns)


def loop_over_time(batch: TrainBatch, gamma: float = 1.0, lam: float = 0.95) -> torch.Tensor:
    """Compute whitened advantages ``[N]`` the plain way, for sequences of one length without prompts."""
    values = batch.values.view(SEQUENCES, TOKENS)
    rewards = torch.zeros_like(values)
    rewards[:, -1] = batch.rewards
    running, next_values, columns = torch.zeros(SEQUENCES), torch.zeros(SEQUENCES), []  # [sequences] each
    for t in reversed(range(TOKENS)):
        running = rewards[:, t] + gamma * next_values - values[:, t] + gamma * lam * running
        next_values = values[:, t]
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=1).flatten()
    return (advantages - advantages.mean()) / advantages.std(correction=0)


def main() -> None:
    os.environ.update(get_platform(DEFAULT_PLATFORM).get_driver_env())
    torch.set_num_threads(1)
    full_batch, prompted_batch = make_batch(0), make_batch(PROMPT)
    difference = float((gae(full_batch)[0] - loop_over_time(full_batch)).abs().max())
    if not difference < TOLERANCE:
        sys.exit(f"error: gae differs from the loop over time by {difference:.1e}, expected below {TOLERANCE:.0e}")
    calls = (lambda: gae(full_batch), lambda: gae(prompted_batch), lambda: loop_over_time(full_batch))
    times = measure_ms(*calls, rounds=ROUNDS)
    print("every token counts {:.0f} ms, after prompts {:.0f} ms, loop over time {:.0f} ms".format(*times))
    print(f"largest difference from the loop {difference:.1e}")
    row = dict(zip(("every token counts ms", "after prompts ms", "loop over time ms"), times, strict=True))
    sizes = {"sequences": SEQUENCES, "tokens of each": TOKENS}
    write_figures(OPTIONS.json, [sizes | row | {"largest difference from the loop": difference}])


if __name__ == "__main__":
    main()
