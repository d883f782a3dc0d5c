"""The run folder: one program claims it, and every file in it is written whole."""

import dataclasses
import errno
import json
import math
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from rlworker.base.digests import (
    DIGESTS,
    DigestFiles,
    FileDigest,
    describe_damage,
    digest_files,
    digest_text,
    find_damage,
    format_digests,
    list_files,
    read_digests,
)
from rlworker.base.errors import RunError
from rlworker.config.run import TrainingConfig
from rlworker.tracking.inputs import Inputs
from rlworker.tracking.provenance import collect_provenance
from rlworker.tracking.step_lines import METRICS, PROMPTS, VALIDATIONS, keep_steps, write_whole

if TYPE_CHECKING:
    from rlworker.config.changes import Changes

_COMPLETE = "trainer.json"
"""File that is written last into a checkpoint, before the folder gets its final name."""
OUTAGES = "outages.jsonl"
"""File with one line for each outage: the place in the run, and how each worker was lost."""
FLOOR = "logprob_diff_floor"
"""Key in a checkpoint's state and in starts.jsonl: the mean |rollout - trainer logprob| by rounding alone at a run's
start."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as a network's: a run on them continues without a lock."""
_PROBE_BYTES = 2**20
"""Bytes that are written to check for free space; every run writes more."""


@dataclass(frozen=True)
class Score:
    """The metric that compares checkpoints: ``name``, and ``sign``, +1 if larger is better, -1 if smaller is."""

    name: str
    sign: int

    def find(self, metrics: Mapping[str, Any]) -> float | None:
        """Find the score among metrics; None where they lack it, or it is NaN, which no order has."""
        return score if (score := metrics.get(self.name)) == score else None

    def has_stalled(self, lines: Sequence[Mapping[str, Any]], patience: int) -> bool:
        """Tell whether the last ``patience`` validations have found no new best; a patience of 0 is never used up.

        Args:
            lines: metrics of each step so far.
        """
        scores = [self.find(line) for line in lines if self.name in line]
        values = [-math.inf if found is None else self.sign * found for found in scores]
        best = max(range(len(values)), key=values.__getitem__, default=0)  # of equals the first
        return 0 < patience < len(values) - best

    def describe_stall(self, patience: int) -> str:
        """Say why a run has ended early, and how to continue it."""
        return (
            f"{self.name} has had no new best for {patience} validations; --resume with a larger "
            "--validation.patience goes on"
        )


class RunFolder:
    """The folder of everything that one run writes.

    It holds config.json, inputs.json, starts.jsonl, metrics.jsonl, prompts.jsonl, validation.jsonl, outages.jsonl,
    environment.log, rollouts/, profile/, checkpoints/, report.html and the library that draws it.
    """

    def __init__(self, path: str):
        self.given = path
        self.path = Path(path).absolute()  # other processes may run elsewhere
        self._lock: FileLock | None = None
        self._changes: Changes = {}
        self.inputs = Inputs(self.path)

    def check(self, config: TrainingConfig) -> None:
        """Check that the folder can hold the run, without creating it.

        Raises:
            ValueError: the folder cannot be created, holds a run and ``resume`` is off, or holds a run with other
                settings (the message names them) or with missing or unknown files in its newest checkpoint.
        """
        if self.given in ("", "."):
            raise ValueError("run_dir: no folder of its own was given; set --run-dir, such as --run-dir runs/mine")
        try:
            nearest = next(path for path in (self.path, *self.path.parents) if path.exists())
        except OSError as error:
            raise self._explain_unwritable(error) from None
        if not nearest.is_dir():
            raise ValueError(
                f"run_dir: {str(self.path)!r} cannot be a folder: {str(nearest)!r} is a file; choose another --run-dir"
            )
        if not (self.path / "config.json").exists():
            return
        if not config.resume:
            raise ValueError(
                f"run_dir: {str(self.path)!r} already holds a run; choose another --run-dir, or add --resume"
            )
        self._list_changes(config)
        if (newest := self.find_newest()) and (damage := find_damage(newest, None)):
            raise ValueError(self._explain_damage(newest, damage))

    def _list_changes(self, config: TrainingConfig) -> "Changes":
        """List the settings that differ from the run's; raises ValueError where they would make it another run."""
        from rlworker.config.changes import read_changes  # a new run has none

        return read_changes(self.path, config, self.inputs.list_movable())

    def claim(self, config: TrainingConfig) -> None:
        """Lock the folder for this run until ``release`` or the end of this process. Call it before anything else
        starts.

        Raises:
            ValueError: as for ``check``, another run has locked the folder, or it cannot be written to.
        """
        self.check(config)
        if self._lock:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path / ".lock", f"run_dir: {str(self.path)!r}")
            _probe(self.path / ".probe.partial")
        except OSError as error:
            self.release()
            raise self._explain_unwritable(error) from None
        try:
            self.check(config)  # another run may have come and gone in between
        except ValueError:
            self.release()
            raise

    def _explain_unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"run_dir: {str(self.path)!r} cannot be written to: {error}; free disk space, make it writable, or choose "
            "another --run-dir"
        )

    def release(self) -> None:
        """Unlock the folder for other programs."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def begin(self, config: TrainingConfig, digest: DigestFiles | None = digest_files) -> tuple[dict | None, str]:
        """Resume the run in a claimed folder, or begin a new one.

        Call it after everything has started: a failed start must not leave a folder that looks taken. A damaged newest
        checkpoint is refused, not skipped: an older checkpoint would lose hours of steps, and the user may have a copy
        of the damaged file. Nothing is changed then.

        Args:
            digest: computes the digests of the checkpoint's files; None compares only names and sizes.

        Returns:
            the state of the newest checkpoint, with its ``folder``, or None without a checkpoint; and a text about it.
                Lines of later steps are cut off.

        Raises:
            RunError: the newest checkpoint is damaged.
        """
        if not (self.path / "config.json").exists():
            self.inputs.write()
            self._write_config(config)
            return None, f"run: begins in {self.path}" + (", which holds none to resume" if config.resume else "")
        newest, self._changes = self.find_newest(), self._list_changes(config)
        if newest and (damage := find_damage(newest, digest)):
            raise RunError(self._explain_damage(newest, damage))
        self._clear_leftovers()
        state: dict[str, Any] | None = _read_state(newest) | {"folder": str(newest)} if newest else None
        files = [self.path / name for name in (METRICS, PROMPTS, VALIDATIONS)]
        if state:
            text = f"run: goes on from step {state['step']} ({Path(state['folder']).relative_to(self.path)})"
            cut, *_ = (keep_steps(path, state["step"]) for path in files)
            text += f"; {cut} lines of {METRICS} are of later steps, which come again" if cut else ""
        else:
            text = f"run: begins again at step 0, since {self.path} has no checkpoint"
            for path in (path for path in files if path.exists() and path.stat().st_size):  # hours of them, perhaps
                os.replace(path, aside := _find_free(path.with_suffix(".before.jsonl")))
                text += f"; what {path.name} had so far is kept as {aside.name}"
        text += self.inputs.write()
        if self._changes:
            spelled = (f"{key} {before} -> {now}" for key, (before, now) in self._changes.items())
            text += f"; with other settings: {', '.join(spelled)}"
        return state, text

    def _write_config(self, config: TrainingConfig) -> None:
        write_whole(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2))

    def record_start(self, step: int, config: TrainingConfig, state: Mapping[str, Any] | None = None) -> None:
        """Add a line to starts.jsonl: the ``step`` from which this program continues, its provenance and models, the
        settings that differ from the previous program's, and, from the trainer's ``state``, the mean logprob difference
        of the first weights where it was measured. Call it once everything is restored."""
        path = self.path / "starts.jsonl"
        before = path.read_text() if path.exists() else ""
        start = {"step": step} | dataclasses.asdict(collect_provenance(config.platform))
        start |= {"models": models} if (models := self.inputs.describe_models()) else {}
        start |= {"changed": self._changes} if self._changes else {}
        start |= {FLOOR: state[FLOOR]} if state and state.get(FLOOR) else {}
        write_whole(path, before + json.dumps(start) + "\n")
        if self._changes:  # last: a start that ends before it leaves the change for the next one to record
            self._write_config(config)

    def _clear_leftovers(self) -> None:
        """Remove unfinished files of a killed run."""
        for folder in chain(*(self.path.glob(f"checkpoints/.step_*.{end}") for end in ("partial", "older"))):
            shutil.rmtree(folder)
        for file in self.path.glob(".*.partial"):
            file.unlink()

    def list_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints in order of their steps; folders with other names are ignored."""
        folders = [f for f in self.path.glob("checkpoints/step_*") if f.name[5:].isdecimal()]
        written = [f for f in folders if (f / _COMPLETE).is_file() or (f / DIGESTS).is_file()]
        return sorted(written, key=lambda f: int(f.name[5:]))

    def find_newest(self) -> Path | None:
        """Return the checkpoint of the highest step, damaged or not; None without a checkpoint."""
        return next(reversed(self.list_checkpoints()), None)

    def count_steps(self) -> int:
        """Count the steps that the newest checkpoint holds; 0 without one, or with a damaged one."""
        newest = self.find_newest()
        return _read_state(newest).get("step", 0) if newest else 0

    def find_newest_good(self, digest: DigestFiles = digest_files) -> tuple[Path | None, list[str]]:
        """Find the newest checkpoint without damage.

        Args:
            digest: computes the digests of files.

        Returns:
            the checkpoint, or None; and a description of the damage of each newer checkpoint.
        """
        passed_over = []
        for checkpoint in reversed(self.list_checkpoints()):
            damage = find_damage(checkpoint, digest)
            if not damage:
                return checkpoint, passed_over
            passed_over.append(describe_damage(checkpoint, damage))
        return None, passed_over

    def leave_damaged(self, digest: DigestFiles) -> list[str]:
        """Rename the checkpoints that are newer than the newest good one.

        Returns:
            for each renamed checkpoint, its damage and its new name.
        """
        good, damaged = self.find_newest_good(digest)
        checkpoints = self.list_checkpoints()
        newer = checkpoints[checkpoints.index(good) + 1 :] if good else checkpoints
        return [f"{text}; kept as {self.set_aside(each).name}" for each, text in zip(reversed(newer), damaged)]

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a damaged checkpoint, so that it is not loaded and no later one replaces it. Returns the new path."""
        aside = _find_free(checkpoint.with_name(f"{checkpoint.name}.damaged"))
        os.replace(checkpoint, aside)
        return aside

    def _explain_damage(self, newest: Path, damage: list[str]) -> str:
        good, _ = self.find_newest_good()
        text = f"{describe_damage(newest, damage)}. Nothing was changed: put back from a copy what is damaged, or "
        if good:
            return text + f"move the folder out of checkpoints, and --resume goes on from {good.name}, which is whole"
        return text + "begin again with another --run-dir: no other checkpoint of this run is whole"

    def find_best(self, score: Score) -> tuple[Path, float] | None:
        """Return the checkpoint with the best score, of equals the latest, and the score; None without scores."""
        scores = [(f, score.find(_read_state(f))) for f in reversed(self.list_checkpoints())]
        return max(((f, s) for f, s in scores if s is not None), key=lambda pair: score.sign * pair[1], default=None)

    def prune(self, newest: int, best: Path | None) -> None:
        """Remove all checkpoints but the ``newest`` so many (0: all), ``best``, and those at which capsules begin."""
        for folder in self.list_checkpoints()[: -newest or None] if newest else []:
            begins = self.path / "capsules" / f"step_{int(folder.name[5:]) + 1}"
            if folder != best and not begins.exists():
                going = folder.with_name(f".{folder.name}.older")  # at once: half a checkpoint must not look whole
                os.replace(folder, going)
                shutil.rmtree(going)

    def begin_checkpoint(self, step: int) -> Path:
        """Make an empty folder for the checkpoint of step ``step``; it does not count before ``finish_checkpoint``."""
        partial = self.path / "checkpoints" / f".step_{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish_checkpoint(self, partial: Path, state: dict, digests: Mapping[str, FileDigest] | None = None) -> Path:
        """Complete a checkpoint that was written to ``partial``, and return its final folder.

        Args:
            state: the run's state, which is written too.
            digests: path in the checkpoint -> digest; missing digests are computed here.
        """
        text, known = json.dumps(state), dict(digests or {})
        known |= digest_files(partial, list_files(partial) - known.keys()) | {_COMPLETE: digest_text(text)}
        write_whole(partial / DIGESTS, format_digests(known))
        write_whole(partial / _COMPLETE, text)
        final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
        older = partial.with_name(f".{final.name}.older")
        shutil.rmtree(older, ignore_errors=True)
        if final.exists():  # the same step saved again: the older one steps aside and goes once the new one stands
            os.replace(final, older)
        os.replace(partial, final)
        shutil.rmtree(older, ignore_errors=True)
        return final


def _read_state(checkpoint: Path) -> dict:
    """Read the trainer's state in a checkpoint; empty where the file is damaged."""
    try:
        text = (checkpoint / _COMPLETE).read_text()
        digests = read_digests(checkpoint)
    except (OSError, ValueError):
        return {}
    return json.loads(text) if digests.get(_COMPLETE) == digest_text(text) else {}


def _find_free(path: Path) -> Path:
    """Find the path, or where it is taken the first of ``NAME.1.END``, ``NAME.2.END``, ... that is free."""
    others = (path.with_suffix(f".{n}{path.suffix}") for n in count(1))
    return next(name for name in chain([path], others) if not name.exists())


def _lock(path: Path, where: str) -> FileLock:
    """Take the lock that is the file at ``path``; its ``release`` or the end of this process gives it back.

    Raises:
        ValueError: another process has it; the message names ``where``, host and process.
        OSError: the file cannot be written to.
    """
    taken = FileLock(path, blocking=False, thread_local=False)
    try:
        taken.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise ValueError(
            f"{where} is being written to by {holder}; wait for its end, or end it, or choose another --run-dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    path.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n", encoding="utf-8")
    return taken


def _probe(path: Path) -> None:
    """Write a file and remove it, to see that there is room. Raises OSError where there is none."""
    try:
        with open(path, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
