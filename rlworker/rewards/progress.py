"""Workers of rewards and plays tell how far they are in files of the node where they run, which are read there.

A worker writes each number to a file of its node as it comes, so that none is lost with a process that dies, and so
that one that gets no further is noticed. Of its own node the driver reads the files itself; on every other one a
small process of Ray reads them for it.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlworker.cluster.process_state import explain, get_last_line
from rlworker.rewards.user_code import name_block_file
from rlworker.rewards.worker import name_failures_file

_ANSWER_S = 120.0
"""Seconds in which a node answers how far its workers are, and starts to. One that does not is taken for lost."""
_CLOSE_S = 5.0
"""Seconds that a node has to remove its files when all ends."""


class NodeLost(Exception):
    """A node no longer answers; what its workers had done is lost with it."""


class ProgressFiles:
    """The files of a node's workers, by the number of the part of a batch that each is at.

    A file has ``[1 + texts]`` numbers: the texts that are scored, then their rewards. Failures among them are lines of
    a file beside it.
    """

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="rlworker_rewards_")

    def get_folder(self) -> str:
        return self._folder.name

    def count_scored(self, parts: list[int]) -> list[int]:
        """Count the texts of each part that are scored; -1 where its worker has not begun."""
        return [int(first[0]) if len(first := self._read(part, 1)) else -1 for part in parts]

    def collect(self, part: int) -> tuple[list[float] | None, list[tuple[int, str, str]]]:
        """Take what was scored of a part, and remove its files.

        Returns:
            the rewards, None where its worker has not begun; and place, kind and message of each failure among them.
        """
        numbers = self._read(part, -1)
        if not len(numbers):
            return None, []
        scored, path = int(numbers[0]), f"{self._folder.name}/{part}"
        lines = Path(name_failures_file(path)).read_text("utf-8").split("\n")[:-1]
        failures = [(place, kind, message) for place, kind, message in map(json.loads, lines)]
        os.remove(path)
        os.remove(name_failures_file(path))
        # A process that died may have written a part of a call's.
        return numbers[1 : 1 + scored].tolist(), [failure for failure in failures if failure[0] < scored]

    def read_play(self, name: str) -> tuple[list[int], list]:
        """Read how far a process of plays is: steps begun, number of the episode and its turn; empty before it begins.
        And the episode that held it, its turn and where, which its watcher found; empty where none did."""
        numbers = self._read(name, 3, np.int64).tolist()
        try:
            block = json.loads(Path(name_block_file(f"{self._folder.name}/{name}")).read_text("utf-8"))
        except (OSError, ValueError):  # none, or half of one
            block = []
        return numbers, block

    def close(self) -> None:
        self._folder.cleanup()

    def _read(self, part: int | str, count: int, dtype: type = np.float64) -> np.ndarray:
        try:
            return np.fromfile(f"{self._folder.name}/{part}", dtype, count)
        except FileNotFoundError:
            return np.empty(0)


@dataclass(eq=False)
class WorkerNode:
    """A node that has workers of rewards or of plays.

    Attributes:
        address: by which messages name it. strategy: for Ray, to start a process there. files: its workers'; a process
            of Ray on every node but the driver's.
        folder: of the files, or Ray's reference to its name.
    """

    address: str
    strategy: NodeAffinitySchedulingStrategy
    files: ProgressFiles | ActorHandle
    folder: Any

    @property
    def is_here(self) -> bool:
        return isinstance(self.files, ProgressFiles)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the node's files.

        Raises:
            NodeLost: it does not answer.
        """
        if isinstance(self.files, ProgressFiles):
            return getattr(self.files, method)(*args)
        try:
            return ray.get(getattr(self.files, method).remote(*args), timeout=_ANSWER_S)
        except (RayError, GetTimeoutError) as error:
            raise NodeLost(f"node {self.address}: {explain(error) or get_last_line(error)}") from error

    def close(self) -> None:
        """Remove the files, where the node is still there to do so."""
        if isinstance(self.files, ProgressFiles):
            self.files.close()
            return
        ray.wait([self.files.close.remote()], timeout=_CLOSE_S)
        self.abandon()

    def abandon(self) -> None:
        """End what reads the files, without waiting for the node."""
        if not isinstance(self.files, ProgressFiles):
            ray.kill(self.files)


def find_nodes(count: int) -> list[WorkerNode]:
    """Find at most ``count`` nodes for such workers, the driver's first and then by address."""
    here = ray.get_runtime_context().get_node_id()
    alive = [
        (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"]
    ]
    return [_open_node(address, name, is_other) for is_other, address, name in sorted(alive)[:count]]


def _open_node(address: str, name: str, is_other: bool) -> WorkerNode:
    strategy = NodeAffinitySchedulingStrategy(name, soft=False)
    if not is_other:
        files = ProgressFiles()
        return WorkerNode(address, strategy, files, files.get_folder())
    remote: Any = ray.remote(ProgressFiles).options(num_cpus=0, scheduling_strategy=strategy)
    reader = remote.remote()
    return WorkerNode(address, strategy, reader, reader.get_folder.remote())
