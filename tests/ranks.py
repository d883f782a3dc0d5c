"""A pool of processes that run a test's function together, as the ranks of a distributed job."""

import multiprocessing
import socket
import traceback
from multiprocessing.connection import wait

import cloudpickle
from support.ledger.process_ledger import note


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _serve(rank: int, world: int, pipe) -> None:
    import os

    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    note("rank")
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        function, args = cloudpickle.loads(call)
        try:
            result = (True, function(rank, world, *args))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(result))


class Ranks:
    """``world`` processes; ``run(f, *args)`` calls ``f(rank, world, *args)`` on each, results in rank order.

    When one of them fails the others may wait for it for ever, so all are ended and the next run starts new ones.
    """

    def __init__(self, world: int):
        self.world = world
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args, timeout: float = 120):
        if not self._processes:
            self._start()
        call = cloudpickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results, waiting = {}, list(self._pipes)
        try:
            while waiting:
                ready = wait(waiting, timeout)
                if not ready:
                    late = [self._pipes.index(pipe) for pipe in waiting]
                    raise TimeoutError(f"ranks {late} did not answer within {timeout} s")
                for pipe in ready:
                    rank = self._pipes.index(pipe)
                    ok, results[rank] = cloudpickle.loads(pipe.recv_bytes())
                    if not ok:
                        raise AssertionError(f"rank {rank} failed:\n{results[rank]}")
                    waiting.remove(pipe)
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
