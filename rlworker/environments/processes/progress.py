"""Environment workers tell their progress in files of the node where they run, which are read there.

So a worker that gets no further is noticed, and of one that died it is known where. Of its own node the driver reads
the files itself; on every other one a small process of Ray reads them for it.
"""

import json
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
from rlworker.environments.user_code import name_block_file

_ANSWER_S = 120.0
"""Seconds in which a node starts to read its files, and answers. One that does not is taken for lost."""
_CLOSE_S = 5.0
"""Seconds that a node has to remove its files when all ends."""


class NodeLost(Exception):
    """A node no longer answers; the work of its processes is lost with it."""


class ProgressFiles:
    """The files of a node's workers: the progress of each, and the line at which an environment holds it."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="rlworker_environments_")

    def get_folder(self) -> str:
        return self._folder.name

    def read_progress(self, name: str) -> tuple[list[int], list]:
        """Read a process's progress: steps begun, number of the episode and its turn; empty before it begins.

        Then the episode that held it, its turn and where, as its watching thread found; empty where none did.
        """
        path = Path(self._folder.name, name)
        try:
            numbers = np.fromfile(path, np.int64, 3).tolist()
        except FileNotFoundError:
            numbers = []
        try:
            block = json.loads(Path(name_block_file(str(path))).read_text("utf-8"))
        except (OSError, ValueError):  # none, or half of one
            block = []
        return numbers, block

    def close(self) -> None:
        self._folder.cleanup()


@dataclass(eq=False)
class WorkerNode:
    """A node that has environment workers.

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
