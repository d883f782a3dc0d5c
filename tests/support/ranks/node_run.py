"""A small RL run, on whatever Ray cluster RAY_ADDRESS names: what the tests of several nodes start on one of them.

PYTHONPATH=tests python tests/support/ranks/node_run.py FOLDER RUN '{"ranks": 4, "tp": 2, "pp": 2}'
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from kill_chain import make_config, reward

from engines.config import MegatronConfig
from rlworker.config.sections import RecoveryConfig
from rlworker.trainers.launch import launch


def main(folder: Path, run: str, sizes: dict[str, int], steps: int = 2, engines: int = 1, restarts: int = 0) -> None:
    """Run some steps on the model and data in ``folder``, with samples on which the reward differs.

    Args:
        sizes: ranks and parallel sizes of the actor.
    """
    config = make_config(folder, run, steps)
    actor: MegatronConfig = replace(config.actor, **sizes, deterministic=True)
    rollout, recovery = replace(config.rollout, engines=engines), RecoveryConfig(restarts=restarts)
    launch(replace(config, actor=actor, rollout=rollout, recovery=recovery), reward)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], **json.loads(sys.argv[3]))
