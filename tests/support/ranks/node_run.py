"""A small RL run, on whatever Ray cluster RAY_ADDRESS names: what the tests of several nodes start on one of them.

PYTHONPATH=tests python tests/support/ranks/node_run.py FOLDER RUN RANKS TP PP
"""

import sys
from dataclasses import replace
from pathlib import Path

from kill_chain import make_config, reward

from engines.config import MegatronConfig
from rlworker.trainers.launch import launch


def main(folder: Path, run: str, ranks: int, tp: int, pp: int) -> None:
    """Run two steps on the model and data in ``folder``, with samples on which the reward differs."""
    config = make_config(folder, run, steps=2)
    actor: MegatronConfig = replace(config.actor, ranks=ranks, tp=tp, pp=pp, deterministic=True)
    launch(replace(config, actor=actor), reward)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
