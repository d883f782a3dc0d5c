"""The trial of a run's reward functions: each is called with a row's own answer before anything heavy starts.

The calls run in a copy of this process, so that what they open, change or end is not the run's.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isnan
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any, Literal, cast

from rlworker.base.terminal import LOGGER
from rlworker.config.run import RunConfig
from rlworker.data.rows import Row, read_first_row
from rlworker.environments.episode import RewardError, read_number
from rlworker.environments.reward import (
    Environment,
    ScoredTurn,
    describe_score,
    is_batch,
    split_score,
    spread_numbers,
)
from rlworker.environments.user_code import describe_error, is_async, name_function, write_output_to


@dataclass(frozen=True)
class _Finding:
    """The outcome of a call.

    Attributes:
        kind: ``number``; ``no_number``: it returned something else; ``failed``: it raised or returned NaN; ``ended``:
            it hung or ended its process, so that no further call is made.
        message: what it returned or raised; empty of a number.
    """

    kind: Literal["number", "no_number", "failed", "ended"]
    message: str = ""


def list_scorers(environment: Environment) -> list[Callable]:
    """List the reward functions that an environment of one turn calls; empty for other environments."""
    return list(environment.scorers) if isinstance(environment, ScoredTurn) else []


def try_rewards(
    environment: Environment, config: RunConfig, sources: Sequence[str], output: Path | None = None
) -> None:
    """Call the reward functions of an environment once for each source, with its first row and the row's answer as the
    text.

    A call that raises, hangs or returns NaN is a warning: other texts may have a reward.

    Args:
        sources: sources of rows, whose fields have been checked.
        output: file to which everything that the calls print and log is appended; None leaves it on the terminal.

    Raises:
        ValueError: a function returned something that is no number.
    """
    scorers = list_scorers(environment)
    rows = [read_first_row(path, config.data) for path in sources] if scorers else []
    calls = [(scorer, place, row) for scorer in scorers for place, row in rows]
    if not calls:
        return
    count, limit_s = config.samples_per_prompt, config.environment.time_limit_s
    # A fork has the functions as they are: nothing is pickled or imported, and it costs milliseconds.
    fork = multiprocessing.get_context("fork")
    here, there = cast(tuple[Connection, Connection], fork.Pipe(duplex=False))
    process = fork.Process(target=_call_all, args=(there, calls, count, output))
    process.start()
    there.close()
    try:
        for scorer, place, row in calls:
            finding = _await_finding(here, limit_s)
            said = f"reward: {name_function(scorer)}, called with the answer {row.answer!r:.40} as the text for {place}"
            if finding.kind == "no_number":
                raise ValueError(f"{said}, {finding.message}; return one")
            if finding.kind != "number":
                LOGGER.warning(f"{said}, {finding.message}; a call that fails so in the run is a failed episode")
            if finding.kind == "ended":
                return
    finally:
        assert process.pid
        with suppress(ProcessLookupError):  # the calls' group, with what they have started
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _await_finding(findings: Connection, limit_s: float) -> _Finding:
    """Return what the next call gave."""
    if not findings.poll(limit_s):
        return _Finding("ended", f"did not return in {limit_s:g} s")
    try:
        return findings.recv()
    except EOFError:
        return _Finding("ended", "ended its process")


def _call_all(
    findings: Connection, calls: Sequence[tuple[Callable, str, Row]], count: int, output: Path | None
) -> None:
    """Make the calls one after another in this process, and send what each gave."""
    os.setsid()
    if output:
        write_output_to(output)
    for number in (signal.SIGINT, signal.SIGTERM):  # the run's own handlers wait for the end of a step
        signal.signal(number, signal.SIG_DFL)
    for scorer, _, row in calls:
        findings.send(_call(scorer, row, count))


def _call(scorer: Any, row: Row, count: int) -> _Finding:
    """Call a scorer with the row's answer, and judge what it returns."""
    texts = [row.answer] * count if is_batch(scorer) else [row.answer]
    call = partial(scorer, texts, [row] * count) if is_batch(scorer) else partial(scorer, row.answer, row)
    try:
        returned = asyncio.run(call()) if is_async(scorer) else call()
        values = spread_numbers(returned, len(texts))
        scores = [split_score(value)[0] for value in values]
        numbers = [read_number(score) for score in scores]
    except RewardError as error:
        return _Finding("no_number", str(error))
    except BaseException as error:  # sys.exit() too is only this call's outcome
        return _Finding("failed", f"raised {describe_error(error)}")
    for value, score, number in zip(values, scores, numbers, strict=True):
        if isnan(number):
            description = describe_score(value) + ("" if isinstance(value, Mapping) else ", expected a number")
            return _Finding("failed" if isinstance(score, Real) else "no_number", description)
    return _Finding("number")
