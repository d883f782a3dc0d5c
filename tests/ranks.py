"""A pool of processes that run a test's function together, as the ranks of a distributed job."""

import multiprocessing
import socket
import traceback

import cloudpickle


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _serve(rank: int, world: int, pipe) -> None:
    import os

    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
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
    """``world`` processes; ``run(f, *args)`` calls ``f(rank, world, *args)`` on each, results in rank order."""

    def __init__(self, world: int):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args, timeout: float = 300):
        call = cloudpickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            results.append(cloudpickle.loads(pipe.recv_bytes()))
        for rank, (ok, value) in enumerate(results):
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
        return [value for _, value in results]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
