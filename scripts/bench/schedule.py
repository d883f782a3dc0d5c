"""How well and how fast sequences are balanced over many replicas.

    python scripts/bench/schedule.py [--tiny]

102,400 log-normal lengths (median 512, at most 32,768) over 1,024 replicas of equal counts, at three widths of the
distribution; beside it, in the same run, sorting the lengths alone, and dealing them out in the order they came in.
"""

import numpy as np
from timing import median_ms, options

from engines.batch.balance import balanced, sequence_costs

TINY = options(__doc__).parse_args().tiny
SEQUENCES, REPLICAS, ROUNDS = (640, 64, 1) if TINY else (102_400, 1_024, 9)
HIDDEN = 4096


def main() -> None:
    for sigma in (0.5, 1.0, 1.5):
        drawn = np.random.default_rng(0).lognormal(np.log(512), sigma, SEQUENCES)
        lengths = drawn.clip(1, 32_768).astype(np.int64)
        costs = sequence_costs(lengths, HIDDEN)
        owner = balanced(costs, REPLICAS)
        assert (np.bincount(owner) == SEQUENCES // REPLICAS).all()
        loads, dealt = np.bincount(owner, weights=costs), costs.reshape(-1, REPLICAS).sum(axis=0)
        ours, sort = median_ms(
            lambda costs=costs: balanced(costs, REPLICAS),
            lambda costs=costs: np.argsort(-costs, kind="stable").tolist(),
            rounds=ROUNDS,
        )
        print(
            f"sigma {sigma}: max/mean {loads.max() / loads.mean():.4f}, as they come {dealt.max() / dealt.mean():.4f}; "
            f"{ours:.0f} ms, of which sorting {sort:.0f} ms"
        )


if __name__ == "__main__":
    main()
