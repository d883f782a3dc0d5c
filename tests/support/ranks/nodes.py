"""Machines for tests: each a network namespace with an address, processes, mounts and a /dev/shm of its own."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_BIN = Path(sys.executable).parent
_UP_S = 90.0
"""Seconds that Ray may take to come up on a node of a busy machine."""


class Nodes:
    """Some nodes with a Ray cluster over them; node 1 is its head.

    Everything hangs on one process, a bridge's namespace, which ends with this program however that ends; the
    namespaces have no names, so that nothing is left.

    Args:
        folder: for Ray's sessions and logs. cpus: that Ray counts on each node.
    """

    def __init__(self, folder: Path, cpus: int):
        self.folder, self.cpus = folder, cpus
        self.nodes: dict[int, subprocess.Popen] = {}
        self.bridge = _unshare(["--net"], ["sleep", "infinity"], folder / "bridge.log")
        self._in(self.bridge, "ip link add br0 type bridge && ip link set br0 up")

    def add(self, node: int, hide: Sequence[Path] = (), env: Mapping[str, str] | None = None) -> None:
        """Add a node whose Ray joins the cluster, or begins it; ``hide`` are folders that it sees empty."""
        kinds = ["--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        process = _unshare(kinds, ["sleep", "infinity"], self.folder / f"node{node}.log")
        self.nodes[node] = process
        inner = _find_child(process.pid)
        self._in(self.bridge, f"ip link add p{node} type veth peer name eth0 netns /proc/{inner}/ns/net")
        self._in(self.bridge, f"ip link set p{node} master br0 up")
        address = self.get_address(node)
        up = f"ip link set lo up && ip addr add {address}/24 dev eth0 && ip link set eth0 up"
        mounts = ["mount -t tmpfs -o size=1g shm /dev/shm", *(f"mount -t tmpfs empty '{each}'" for each in hide)]
        self.run(node, " && ".join([up, *mounts]))
        # Unix sockets have short paths, and two nodes must not see each other's.
        session = self.folder / f"r{node}"
        session.mkdir()
        joins = "--head --port 6379 --include-dashboard false" if node == 1 else f"--address {self.get_address(1)}:6379"
        sizes = f"--num-cpus {self.cpus} --object-store-memory 200000000 --temp-dir {session} --disable-usage-stats"
        self.run(node, f"ray start {joins} --node-ip-address {address} {sizes}", env=env)

    def run(
        self, node: int, command: str, env: Mapping[str, str] | None = None, check: bool = True, limit_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a node, with this project and its Python, and Ray's address."""
        enter = ["nsenter", "-t", str(_find_child(self.nodes[node].pid)), "-n", "-p", "-m"]
        enter += ["bash", "-c", f"cd {_ROOT} && {command}"]
        env = self._make_env() | dict(env or {})
        done = subprocess.run(enter, env=env, capture_output=True, text=True, timeout=limit_s)
        if check and done.returncode:
            raise RuntimeError(f"node {node}: {command}\n{done.stdout}{done.stderr}")
        return done

    def wait_until_up(self) -> None:
        ask = "import ray; ray.init(logging_level='ERROR'); print(sum(node['Alive'] for node in ray.nodes()))"
        end = time.monotonic() + _UP_S
        while (up := self.run(1, f'python -c "{ask}"').stdout.split()[-1:]) != [str(len(self.nodes))]:
            if time.monotonic() > end:
                raise RuntimeError(f"nodes: Ray has {up} of {len(self.nodes)} after {_UP_S} s; see {self.folder}")

    def kill(self, node: int) -> None:
        """End a node and everything on it at once, as a machine dies."""
        process = self.nodes.pop(node)
        process.kill()
        process.wait()

    def close(self) -> None:
        for node in list(self.nodes):
            self.kill(node)
        self.bridge.kill()
        self.bridge.wait()

    def get_address(self, node: int) -> str:
        return f"10.77.0.{node}"

    def _make_env(self) -> dict[str, str]:
        own = {
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests'}",
            "RAY_ADDRESS": f"{self.get_address(1)}:6379",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"} | os.environ | own

    def _in(self, process: subprocess.Popen, command: str) -> None:
        subprocess.run(["nsenter", "-t", str(process.pid), "-n", "bash", "-c", command], check=True)


@contextmanager
def nodes(count: int, folder: Path, cpus: int = 2, hide: Mapping[int, Sequence[Path]] | None = None) -> Iterator[Nodes]:
    """Run some nodes and take them down again; skip the test where this machine does not let us.

    Args:
        folder: a short path, new. hide: folders that a node sees empty.

    Raises:
        RuntimeError: namespaces are not permitted and RLWORKER_REQUIRE_NODES is set.
    """
    if why := _find_hindrance():
        if os.environ.get("RLWORKER_REQUIRE_NODES"):
            raise RuntimeError(f"nodes: {why}, and RLWORKER_REQUIRE_NODES asks for them")
        pytest.skip(f"nodes in namespaces: {why}")
    folder.mkdir(parents=True)
    cluster = Nodes(folder, cpus)
    try:
        for node in range(1, count + 1):
            cluster.add(node, (hide or {}).get(node, ()))
        cluster.wait_until_up()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def _find_hindrance() -> str:
    """Say why this machine cannot have nodes; empty where it can."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if not shutil.which(tool)]:
        return f"{missing} are not installed"
    command = ["unshare", "--net", "--pid", "--mount", "--fork", "ip", "link", "set", "lo", "up"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return tried.stderr.strip()


def _unshare(kinds: Sequence[str], command: Sequence[str], log: Path) -> subprocess.Popen:
    """Start a command in namespaces of its own, which ends with this program whatever ends that."""
    with log.open("w") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, *command], stdout=output, stderr=output
        )
    end = time.monotonic() + 10
    while not _has_own_net(process.pid):
        if time.monotonic() > end or process.poll() is not None:
            raise RuntimeError(f"nodes: no namespaces came up: {log.read_text()}")
        time.sleep(0.01)
    return process


def _has_own_net(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _find_child(pid: int) -> int:
    """Find the first process within a PID namespace, whose end ends them all."""
    end = time.monotonic() + 10
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if time.monotonic() > end:
            raise RuntimeError(f"nodes: process {pid} has no child")
        time.sleep(0.01)
    return int(children[0])
