"""The base of RL and supervised runs: it takes steps, evaluates, saves, and ends when a signal asks it to."""

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from ray.actor import ActorHandle

from engines.batch.batch import TrainBatch
from engines.batch.shard import Outputs
from hardware.attention.capabilities import list_override_warnings
from hardware.platform import describe
from hardware.platforms import get_platform
from rlworker.base.digests import FileDigest
from rlworker.base.errors import NothingScored, RunError
from rlworker.base.terminal import LOGGER, log_start
from rlworker.cluster.placement import ResourceRequest, check_room, list_nodes
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup, WorkerGroup, save_groups
from rlworker.cluster.watch import limiting_stalls, naming_failures, wait_for
from rlworker.cluster.workers import TrainWorker
from rlworker.config.run import TrainingConfig
from rlworker.config.sizes import count_batch_bytes
from rlworker.environments.processes.pool import ProcessPool
from rlworker.tracking.capsule.keep import keeping_capsule
from rlworker.tracking.log import HELDOUT, RunLog, StepClock, is_due, read_metrics
from rlworker.tracking.report.page import format_report
from rlworker.tracking.run_folder import RunFolder, Score
from rlworker.tracking.tracker import TrackedRun, Tracker
from rlworker.tracking.trackers import Trackers, check_trackers
from rlworker.trainers.outages import ADVICE, Outages
from rlworker.trainers.stop import Stop

Config = TypeVar("Config", bound=TrainingConfig)
Processes = TypeVar("Processes", bound=Rollouts | StartingGroup | ProcessPool)

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE)
"""Errors of writing to a disk that is full, gone or read-only."""
_BETWEEN_STEPS = ("evaluate", "save", "restart", "restore")
"""Phases that belong to the last step that was done rather than to the one that runs."""


class Run(Generic[Config]):
    """A run that trains, without the content of its steps.

    The constructor checks everything that a user can get wrong; ``start`` then starts the engines, and ``fit`` trains
    to the last step. Use it as a context manager, so that the engines end with it.

    A subclass defines the step, its engines, the evaluation and the content of a checkpoint: ``start_engines``,
    ``take_groups``, ``step``, ``evaluate``, ``list_learners``, ``get_state``, ``restore``.

    Args:
        folder: the run folder, where the caller has claimed it already.
        stop: tells the run that a signal asks it to end; without it the caller handles signals.
        trackers: trackers in addition to those that ``config.trackers`` names.

    Raises:
        ValueError: the run folder cannot hold this run.
    """

    line: tuple
    """Metrics of a step that the terminal shows."""
    score: Score
    """The held-out metric by which checkpoints are compared."""
    has_begun = False
    """Whether the engines have started, and the run has been begun or resumed."""
    log: RunLog
    """Writes metrics and samples; it is set once the run has begun."""
    tokenizer: Any
    """The tokenizer of the model that is trained."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder | None = None,
        stop: Stop | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        self.config, self.stop_request, self.trackers = config, stop or Stop(), trackers
        self.folder = folder or RunFolder(config.run_dir)
        self.folder.check(config)
        check_trackers(config.trackers)
        self.steps_done, self.running = 0, ExitStack()
        self.skipped: dict[str, int] = {}
        self.start_seconds: dict[str, float] = {}
        self.processes: list[Rollouts | StartingGroup | ProcessPool] = []
        self.outages = Outages(config.recovery.restarts, self.folder.path)

    # -- what kinds of runs differ in

    def start_engines(self, clock: StepClock) -> None:
        """Start every process of the run by ``start_processes``, and wait until all are ready."""
        raise NotImplementedError

    def take_groups(self, groups: dict[str, WorkerGroup]) -> None:
        """Train with these engines from now on: name of the role -> engine."""
        raise NotImplementedError

    def step(self) -> tuple[dict[str, float], list[dict]]:
        """Take one step, and return its metrics and some of its samples."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out rows; empty without held-out rows."""
        raise NotImplementedError

    def list_learners(self) -> list[WorkerGroup]:
        """Return the training engines whose state a checkpoint holds."""
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds in addition to the step and the engines' state."""
        return {}

    def restore(self, state: dict) -> None:
        """Restore the state of a checkpoint. A state without ``folder`` is that of a run that has just begun."""
        for group in self.list_learners() if "folder" in state else ():
            group.call(TrainWorker.load, f"{state['folder']}/{group.name}")

    def digest_files(self, folder: Path, names: list[str]) -> Mapping[str, FileDigest]:
        """Return file name -> digest for files of a checkpoint; the ranks that will load the files share the work."""
        workers = self.list_learners()[0].workers
        shares = [names[rank :: len(workers)] for rank in range(len(workers))]
        calls = [worker.digest_files.remote(str(folder), share) for worker, share in zip(workers, shares)]
        return {name: digest for part in wait_for(calls) for name, digest in part.items()}

    # -- what they share

    def __enter__(self) -> Self:
        with self.running as running:
            self.start()
            self.running = running.pop_all()  # started whole: what ends with it now ends in __exit__
        return self

    def __exit__(self, *error) -> None:
        """End the engines, and Ray where it was started for them. Written files stay."""
        self.running.__exit__(*error)

    def start(self) -> None:
        """Claim the run folder, start every engine, then resume the run that the folder holds, or begin a new one."""
        config, clock = self.config, StepClock()
        self.folder.claim(config)
        self.running.callback(self.folder.release)
        platform = get_platform(config.platform)
        for section, dtype in config.dtypes.items():
            if reason := platform.explain_slow(dtype):
                LOGGER.warning(f"{section}.dtype={dtype} is slow here: {reason}. Take --{section}.dtype float32")
        os.environ.update(platform.get_driver_env())
        self.running.enter_context(limiting_stalls(config.recovery.stall_timeout_s))
        self.running.enter_context(running_ray(config.num_workers, config.platform, count_batch_bytes(config)))
        check_room([ResourceRequest(who, config.platform, *sizes) for who, *sizes in config.worker_groups])
        if len(list_nodes()) > 1:
            from rlworker.cluster.node_checks import check_nodes

            inputs = self.folder.inputs
            check_nodes(sorted(inputs.model_folders), sorted(inputs.image_folders), self.folder.path)
        self.start_engines(clock)
        self.begin()
        self.start_seconds = clock.seconds

    def start_processes(self, processes: Processes) -> Processes:
        """Register processes, so that they end with this run and messages can name them; return them."""
        self.processes.append(processes)
        self.running.enter_context(processes)
        return processes

    def wait_for_trainers(self) -> None:
        """Wait until all training engines have started, then pass them to ``take_groups``."""
        groups: dict[str, WorkerGroup] = {}
        for starting in self._list_starting():
            groups |= starting.wait()
        self.take_groups(groups)

    def _list_starting(self) -> list[StartingGroup]:
        return [processes for processes in self.processes if isinstance(processes, StartingGroup)]

    def name_workers(self) -> dict[str, ActorHandle]:
        """Return Ray's handle of every process of the run by the name that messages use."""
        return {name: worker for processes in self.processes for name, worker in processes.name_workers().items()}

    def begin(self) -> None:
        """Resume the run that the claimed folder holds, or begin a new one, once its engines have started."""
        config = self.config
        self._first_state = {"step": 0} | self.get_state()
        state, text = self.folder.begin(config, self.digest_files)
        self.steps_done = state["step"] if state else 0
        tracked = TrackedRun(self.folder.path, self.steps_done, asdict(config))
        trackers = Trackers(config.trackers, tracked, self.trackers)
        line = [(label, self.score.name if label == HELDOUT else key, form) for label, key, form in self.line]
        log = RunLog(self.folder.path, config.steps, self.steps_done, trackers, line, format_report)
        self.log = self.running.enter_context(log)
        self.has_begun = True
        LOGGER.info(text)
        if (platform := get_platform(config.platform)).proven != "executed":
            LOGGER.info(f"NOTE platform: {describe(platform)}")
        if config.actor.deterministic and platform.repeats:
            LOGGER.info(f"NOTE actor.deterministic: {platform.name} repeats its numbers without it")
        for warning in list_override_warnings(config.actor.attention_override):
            LOGGER.warning(warning)
        if any(self.skipped.values()):
            counts = " and ".join(f"{count} of {name.removeprefix('skipped_')}" for name, count in self.skipped.items())
            LOGGER.info(f"data: skipped rows that are too long or have bad images: {counts}")
        if state:
            with self._phase(StepClock(), "restore"):
                self.restore(state)
            log_start(f"step {self.steps_done} is restored")
        self._note_saved()
        self.folder.record_start(self.steps_done, config, self.get_state())

    def _note_saved(self) -> Path | None:
        """Take note that the run folder holds the step that is done, or the start; returns the best checkpoint."""
        best = self.folder.find_best(self.score)
        self._best = best and best[1]
        self._saved_step, self._saved_at = self.steps_done, time.monotonic()
        return best and best[0]

    def fit(self) -> dict[str, float]:
        """Train to the last step, or to the end of the step in which a signal asks the run to stop. Evaluate and save.

        Returns:
            the metrics of the last step.

        Raises:
            RunError: a worker failed, or the run folder can no longer be written to.
        """
        try:
            try:
                return self.outages.repeat(self._steps, self._go_back)
            finally:  # a run that ends early has a report too
                self.log.draw_report()
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            raise RunError(
                f"step {self.steps_done}: {str(self.folder.path)!r} cannot be written to: {error}; free disk space or "
                "make the folder writable, then start again with --resume, which continues from the last checkpoint"
            ) from error

    def _go_back(self) -> None:
        """Start every training process anew and take the run up from its newest good checkpoint, or from its start."""
        with self._phase(StepClock(), "restart"):
            for starting in self._list_starting():
                starting.restart()
            self.wait_for_trainers()
            for text in self.folder.leave_damaged(self.digest_files):
                LOGGER.warning(text)
        state, text = self.folder.begin(self.config, None)  # whose files have just been read
        self.steps_done = state["step"] if state else 0
        self.log.go_back(self.steps_done)
        LOGGER.info(text)
        with self._phase(StepClock(), "restore"):
            self.restore(state or self._first_state)
        self._note_saved()

    def _steps(self) -> dict[str, float]:
        config, metrics = self.config, {}
        self.stop_request.in_hand = f"step {self.steps_done + 1}"
        if self.steps_done == 0:
            self.log.step(0, self.evaluate() | self.start_seconds | self.skipped | self.outages.count())
        while self.steps_done < config.steps and not self.stop_request.signal and not self._has_stalled(metrics):
            self.stop_request.in_hand = f"step {self.steps_done + 1}"
            try:
                with keeping_capsule(self, metrics):
                    metrics, samples = self.step()
            except NothingScored:
                self.save(metrics)
                raise
            last = self.steps_done == config.steps
            if last or is_due(self.steps_done, config.eval_every):
                metrics |= self.evaluate()
            if samples and (config.keeps_samples(self.steps_done) or self.score.name in metrics):
                self.log.rollouts(self.steps_done, samples)
            clock, written = StepClock(), None
            try:
                if last or self.stop_request.signal or self._is_save_due(metrics):
                    written = self._write_checkpoint(clock)
            finally:  # with its seconds, and before it counts: a run that goes on from it has the lines up to it
                self.log.step(self.steps_done, metrics | clock.seconds | self.outages.count())
            if written:
                self._finish_checkpoint(*written, metrics)
        self.save(metrics)
        ended = f"after step {self.steps_done} of {config.steps}"
        if self.steps_done < config.steps and self.stop_request.signal:
            LOGGER.info(f"stopped {ended}; the same with --resume goes on")
            return metrics
        self.stop_request.in_hand = ""
        if self.steps_done < config.steps:
            LOGGER.info(f"ended {ended}: {self.score.describe_stall(config.validation.patience)}")
        return metrics

    def reject_step(self, role: str, batch: TrainBatch, outputs: Outputs) -> None:
        """End the run at an optimizer step whose gradient is not finite, as ``rejected_step.reject_step``."""
        from rlworker.trainers.rejected_step import reject_step

        reject_step(self.folder.path, self.steps_done + 1, role, batch, outputs, self.tokenizer)

    def _has_stalled(self, metrics: Mapping[str, float]) -> bool:
        """Tell whether to end early; asked after each validation, and as a run is taken up."""
        patience = self.config.validation.patience
        is_asked = patience and (not metrics or self.score.name in metrics)
        return bool(is_asked) and self.score.has_stalled(read_metrics(self.folder.path), patience)

    def _is_save_due(self, metrics: dict[str, float]) -> bool:
        checkpoint = self.config.checkpoint
        score = self.score.find(metrics)
        is_best = score is not None and (self._best is None or self.score.sign * (score - self._best) > 0)
        is_late = 0 < 60 * checkpoint.save_minutes <= time.monotonic() - self._saved_at
        return (checkpoint.keep_best and is_best) or is_due(self.steps_done, checkpoint.save_every) or is_late

    def save(self, metrics: Mapping[str, float]) -> None:
        """Write a checkpoint of the last step, unless it has one, and remove the checkpoints that it replaces.

        Args:
            metrics: metrics of the last step; a held-out score among them becomes the checkpoint's score.
        """
        if self._saved_step < self.steps_done:
            self._finish_checkpoint(*self._write_checkpoint(StepClock()), metrics)

    def _write_checkpoint(self, clock: StepClock) -> tuple[Path, dict[str, FileDigest]]:
        """Write the engines' state, on the clock: a folder that does not count yet, and the digests of its files."""
        with self._phase(clock, "save"):
            partial_folder = self.folder.begin_checkpoint(self.steps_done)
            return partial_folder, save_groups(self.list_learners(), partial_folder)

    def _finish_checkpoint(
        self, partial_folder: Path, digests: dict[str, FileDigest], metrics: Mapping[str, float]
    ) -> None:
        """Make a written checkpoint count, and remove those that it replaces."""
        scores = {name: value for name, value in metrics.items() if name.startswith(HELDOUT)}
        state = {"step": self.steps_done} | self.get_state() | scores
        self.folder.finish_checkpoint(partial_folder, state, digests)
        best, checkpoint = self._note_saved(), self.config.checkpoint
        self.folder.prune(checkpoint.keep_newest, best if checkpoint.keep_best else None)

    @contextmanager
    def _phase(self, clock: StepClock, name: str) -> Iterator[None]:
        """Time a phase on the clock, in which a worker that fails is named."""
        step = self.steps_done if name in _BETWEEN_STEPS else self.steps_done + 1
        where = f"step {step}, phase {name}" if self.has_begun else f"phase {name}"
        self.outages.where, advice = where, ADVICE if self.has_begun else ""
        with clock.phase(name), naming_failures(where, self.name_workers, advice), self._tracing(step, name):
            yield

    def _tracing(self, step: int, phase: str) -> AbstractContextManager[None]:
        if not self.has_begun or step not in self.config.profiled_steps:
            return nullcontext()
        from rlworker.cluster.traces import tracing

        engines = [each for each in self.processes if isinstance(each, StartingGroup | Rollouts)]
        workers = {name: worker for each in engines for name, worker in each.name_workers().items()}
        return tracing(self.folder.path, step, phase, workers)
