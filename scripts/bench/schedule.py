"""Measure how well and how fast sequences are balanced over many replicas.

    python scripts/bench/schedule.py [--tiny] [--json FILE]

102,400 log-normal lengths (median 512, at most 32,768) over 1,024 replicas of equal counts, at three widths of the
distribution; beside it, in the same run, sorting the lengths alone, and dealing them out in the order they came in.
"""

import numpy as np
from timing import make_parser, measure_ms, write_figures

from engines.batch.balance import balance_costs, estimate_costs

OPTIONS = make_parser(__doc__).parse_args()
SEQUENCES, REPLICAS, ROUNDS = (640, 64, 1) if OPTIONS.tiny else (102_400, 1_024, 9)
HIDDEN = 4096


def main() -> None:
    rows = []
    for sigma in (0.5, 1.0, 1.5):
        draws = np.random.default_rng(0).lognormal(np.log(512), sigma, SEQUENCES)
        lengths = draws.clip(1, 32_768).astype(np.int64)
        costs = estimate_costs(lengths, HIDDEN)
        replicas = balance_costs(costs, REPLICAS)
        assert (np.bincount(replicas) == SEQUENCES // REPLICAS).all()
        loads, dealt_loads = np.bincount(replicas, weights=costs), costs.reshape(-1, REPLICAS).sum(axis=0)
        balance_ms, sort_ms = measure_ms(
            lambda costs=costs: balance_costs(costs, REPLICAS),
            lambda costs=costs: np.argsort(-costs, kind="stable").tolist(),
            rounds=ROUNDS,
        )
        max_ratio, dealt_ratio = (float(costs.max() / costs.mean()) for costs in (loads, dealt_loads))
        print(
            f"sigma {sigma}: max/mean {max_ratio:.4f}, as they come {dealt_ratio:.4f}; {balance_ms:.0f} ms, "
            f"of which sorting {sort_ms:.0f} ms"
        )
        above = {"largest above mean %": 100 * (max_ratio - 1), "as they come %": 100 * (dealt_ratio - 1)}
        rows.append({"sigma": sigma} | above | {"balancing ms": balance_ms, "of which sorting ms": sort_ms})
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
