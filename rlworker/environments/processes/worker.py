"""The process that runs environments, and its thread that interrupts an environment which holds the process too long.

This module imports neither torch nor an engine, so that a process that replaces a lost one starts at once.
"""

import gc
import json
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from rlworker.environments.policy import EpisodeLimits
from rlworker.environments.processes.runner import EnvRunner
from rlworker.environments.processes.timing import RunningEpisode, list_user_frames
from rlworker.environments.user_code import INTERRUPT, Interrupt, locate, name_block_file, write_output_to


class EnvWorker:
    """A process that runs environments.

    Ray runs its methods in the main thread, where Python handles signals; environments run there too.

    Args:
        environment: the pickled pair of environment and ``Codec``.
        limits: limits of each episode.
        output: file to which everything that environments print and log is appended; None leaves it to Ray.
        folder: folder of this node's progress files.
        name: name of this process's progress file in ``folder``.
    """

    def __init__(self, environment: bytes, limits: EpisodeLimits, output: Path | None, folder: str, name: str):
        if output:  # before the environment is loaded, whose modules may print as well
            write_output_to(output)
        from ray import cloudpickle

        self._path = f"{folder}/{name}"
        self._progress = Progress()
        function, codec = cloudpickle.loads(environment)
        self._runner = EnvRunner(function, codec, limits, self._progress)
        gc.freeze()  # what is loaded stays, and need not be looked through in every round

    def advance(self, message: bytes) -> bytes:
        """Call ``EnvRunner.advance`` with the pickled arguments ``message``, and return its ``Reply``, pickled."""
        if not self._progress.is_open:
            self._progress.open(self._path)
            watch_runner(self._runner, name_block_file(self._path))
        return pickle.dumps(self._runner.advance(*pickle.loads(message)), protocol=5)


class Progress:
    """The progress of a process, in a file for the driver: number of steps, and episode of the last."""

    def __init__(self):
        self._numbers: Any = [0, 0]
        self.is_open = False

    def open(self, path: str) -> None:
        """Create the file: two int64."""
        self._numbers, self.is_open = np.memmap(path, np.int64, "w+", shape=(2,)).data, True

    def __call__(self, number: int) -> None:
        numbers = self._numbers
        numbers[1] = number
        numbers[0] += 1


def watch_runner(runner: EnvRunner, block_file: str) -> None:
    """Start a thread that interrupts an environment which holds the main thread past its time limit.

    First the line where the environment is goes to ``block_file``, for the driver, which ends a process that does not
    heed the interrupt. An import is not interrupted: a half-imported package would stay behind for every later call.
    The interrupt comes once the import ends, or the driver ends the process.
    """
    main, limit = threading.main_thread().ident or 0, runner.limits.time_limit_s

    def is_overdue(step: Any) -> bool:
        return step is not None and step[0].used_s + time.monotonic() - step[1] >= limit

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        if not is_overdue(runner.timer.step):
            return  # the step that the signal was meant for has ended in between
        frames = list_user_frames(frame)
        if not any(place.f_code.co_filename.startswith("<frozen importlib") for place, _ in frames):
            runner.timer.step = None
            raise Interrupt(locate(frames))

    def tell(running: RunningEpisode) -> None:
        where = locate(list_user_frames(sys._current_frames().get(main)))
        line = json.dumps([running.number, where])
        Path(block_file).write_text(line, encoding="utf-8")

    def watch() -> None:
        told = None
        while not runner.is_closed:
            time.sleep(min(limit / 20, 0.1))
            step = runner.timer.step
            if step and is_overdue(step):
                if told is not step:  # once: the process may be ended while this writes
                    tell(step[0])
                    told = step
                signal.pthread_kill(main, INTERRUPT)

    signal.signal(INTERRUPT, interrupt)
    threading.Thread(target=watch, daemon=True).start()
