"""Processes that run a test's function together, as the ranks of a distributed job.

They are forked from a server that has torch, Megatron and the engine loaded (``server.py``): a rank is
there in a third of a second and costs next to no time, where a spawned one imports for five CPU-seconds.
"""

import multiprocessing
import os
import secrets
import socket
import traceback
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
from support.suite.ledger.sitecustomize import note

TESTS = Path(__file__).parents[2]


def draw_address() -> str:
    """Find a port for rank 0, between those of Ray and those that the kernel hands to whoever connects.

    It is drawn apart from the seeds of tests, which processes beside each other have alike.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return f"127.0.0.1:{probe.getsockname()[1]}"


def set_environment() -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")


def _serve(rank: int, pipe: Connection) -> None:
    set_environment()
    note("rank")
    from support.ranks.engines_cases import leave_groups

    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        function, world, args, is_other_size = cloudpickle.loads(call)
        try:
            if is_other_size:
                leave_groups()
            result = (True, function(rank, world, *args))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(result))


def _start_server() -> None:
    """Start the fork server, if it does not run, with what it loads on its path: it passes over what it cannot import.

    Python 3.11 gives a fork server this process's ``sys.path`` and does not use it.
    """
    multiprocessing.set_forkserver_preload(["support.ranks.server"])
    path = filter(None, [os.environ.get("PYTHONPATH"), str(TESTS), str(TESTS.parent)])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path)):
        forkserver.ensure_running()


@dataclass
class _Running:
    """Processes of a pool, by their rank, and how many of them ran together last."""

    ranks: dict[int, tuple[multiprocessing.Process, Connection]] = field(default_factory=dict)
    last_world: int = 0


class Ranks:
    """``world`` processes; ``run(f, *args)`` calls ``f(rank, world, *args)`` on each, results in rank order.

    When one of them fails the others may wait for it for ever, so all are ended and the next run starts new ones.
    """

    def __init__(self, world: int):
        self.world = world
        self._context = multiprocessing.get_context("forkserver")
        _start_server()
        self._running = _Running()

    def take_first(self, world: int) -> "Ranks":
        """Return the first ``world`` of these ranks as a pool of that size: the processes are the same.

        Process groups that the ranks have are theirs as long as the same number of them runs: all leave theirs where
        it is another, so that none takes for the others' what it has from before.
        """
        ranks = copy(self)
        ranks.world = world
        return ranks

    def _open_pipe(self, rank: int) -> Connection:
        """Return the pipe to a rank, which is started where it is not there."""
        if rank not in self._running.ranks:
            pipe, far_end = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, far_end), daemon=True)
            process.start()
            far_end.close()
            self._running.ranks[rank] = process, pipe
        return self._running.ranks[rank][1]

    def run(self, function, *args: Any, timeout: float = 120) -> list:
        """Call the function on every rank.

        Raises:
            AssertionError: one raised; the message has its traceback.
            TimeoutError: one did not answer in ``timeout`` seconds after another did.
        """
        call = cloudpickle.dumps((function, self.world, args, self.world != self._running.last_world))
        self._running.last_world = self.world
        ranks = {self._open_pipe(rank): rank for rank in range(self.world)}
        try:
            for pipe in ranks:
                pipe.send_bytes(call)
            results, waiting = {}, list(ranks)
            while waiting:
                ready = wait(waiting, timeout)
                if not ready:
                    late_ranks = [ranks[pipe] for pipe in waiting]
                    raise TimeoutError(f"ranks {late_ranks} did not answer within {timeout} s")
                for pipe in ready:
                    ok, results[ranks[pipe]] = cloudpickle.loads(pipe.recv_bytes())
                    if not ok:
                        raise AssertionError(f"rank {ranks[pipe]} failed:\n{results[ranks[pipe]]}")
                    waiting.remove(pipe)
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End these ranks; another run starts them anew."""
        ending = [self._running.ranks.pop(rank) for rank in range(self.world) if rank in self._running.ranks]
        self._running.last_world = 0
        for process, pipe in ending:
            pipe.close()
            process.kill()
        for process, _ in ending:
            process.join()
