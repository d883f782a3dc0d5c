"""Play the tasks of a taskset of ``verifiers`` 0.4, in a Python of its own, since it asks for an older ``openai``."""

import asyncio
import json
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from typing import Any

from rlworker.data.rows import Row
from rlworker.environments.adapters.verifiers_program import make_command
from rlworker.environments.episode import Episode
from rlworker.environments.policy import Policy

_programs: dict[tuple[str, ...], asyncio.Future] = {}


@dataclass(frozen=True)
class VerifiersEnvironment:
    """Plays tasks of a taskset, by its harness and for its rewards.

    Attributes:
        python: the interpreter that has ``verifiers``. tasksets: a folder with tasksets that are not installed there.
        settings: those of ``SingleAgentEnvConfig``, such as ``{"taskset": {"id": "gsm8k-v1"}}``.
        tool_parser: name of vLLM's parser for the model's tool calls.
    """

    python: str
    settings: dict[str, Any]
    tool_parser: str = ""
    tasksets: str = ""

    async def __call__(self, policy: Policy, row: Row) -> Episode:
        """Play the task whose number is the row's field ``index``."""
        endpoint = policy.endpoint(row, tool_parser=self.tool_parser)
        command = make_command(self.python, self.settings, self.tasksets)
        started = _programs.get(command)
        if not started or (started.done() and started.result()[0].returncode is not None):
            started = _programs[command] = asyncio.ensure_future(_start(command))
        process, answers = await asyncio.shield(started)
        answers[policy.number] = asyncio.get_running_loop().create_future()
        asked = {"number": policy.number, "index": row.source["index"], "base_url": endpoint.base_url}
        process.stdin.write(f"{json.dumps(asked)}\n".encode())
        endpoint.episode.reward(await answers[policy.number])
        return endpoint.episode


async def _start(command: tuple[str, ...]) -> tuple[Any, dict[int, asyncio.Future]]:
    process, answers = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 24), {}
    answers[-1] = asyncio.ensure_future(_hear(process, answers))  # kept, or it might be collected
    return process, answers


async def _hear(process: Any, answers: dict[int, asyncio.Future]) -> None:
    """Hand the program's answers on; where it ends, those that are missing fail."""
    async for line in process.stdout:
        told = json.loads(line)
        if not (answer := answers.pop(told["number"])).done():
            answer.set_exception(RuntimeError(told["error"])) if told["error"] else answer.set_result(told["reward"])
    for number in [number for number in answers if number >= 0]:
        if not (answer := answers.pop(number)).done():  # an episode at its time limit has cancelled its own
            answer.set_exception(RuntimeError("verifiers: its program ended; environment.log shows the cause"))
