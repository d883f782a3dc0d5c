"""Environment workers write their progress to files of the node where they run; the driver reads the files.

So the driver notices a worker that makes no progress, and knows where a worker died. It reads the files of its own node
itself; on every other node a small Ray process reads them.
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
"""Seconds that a node has to start the reader of its files and to answer. A node that does not counts as lost."""
_CLOSE_S = 5.0
"""Seconds that a node has to remove its files at the end of a run."""


class NodeLost(Exception):
    """A node does not answer any more, so that the work of its processes is lost."""


class ProgressFiles:
    """The progress files of one node's workers, and the files that say where an environment holds a worker."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="rlworker_environments_")

    def get_folder(self) -> str:
        return self._folder.name

    def read_progress(self, name: str) -> tuple[list[int], list]:
        """Read the files of the worker ``name``.

        Returns:
            ``[steps begun, episode]``, empty before the worker begins; and ``[episode, line]`` of an
                environment that holds the worker, empty where none does.
        """
        path = Path(self._folder.name, name)
        try:
            numbers = np.fromfile(path, np.int64, 2).tolist()
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
        address: the node's address, which names it in messages.
        strategy: places a Ray process on this node.
        files: the progress files; on every node but the driver's, a Ray process that reads them.
        folder: the files' folder, or Ray's reference to its name.
    """

    address: str
    strategy: NodeAffinitySchedulingStrategy
    files: ProgressFiles | ActorHandle
    folder: Any

    @property
    def is_here(self) -> bool:
        return isinstance(self.files, ProgressFiles)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of ``ProgressFiles`` on the node.

        Raises:
            NodeLost: the node does not answer.
        """
        if isinstance(self.files, ProgressFiles):
            return getattr(self.files, method)(*args)
        try:
            return ray.get(getattr(self.files, method).remote(*args), timeout=_ANSWER_S)
        except (RayError, GetTimeoutError) as error:
            raise NodeLost(f"node {self.address}: {explain(error) or get_last_line(error)}") from error

    def close(self) -> None:
        """Remove the files, where the node still answers."""
        if isinstance(self.files, ProgressFiles):
            self.files.close()
            return
        ray.wait([self.files.close.remote()], timeout=_CLOSE_S)
        self.abandon()

    def abandon(self) -> None:
        """End the process that reads the files, without waiting for the node."""
        if not isinstance(self.files, ProgressFiles):
            ray.kill(self.files)


def find_nodes(count: int) -> list[WorkerNode]:
    """Return at most ``count`` living nodes for environment workers, the driver's first, then by address."""
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
