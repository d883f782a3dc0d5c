"""The end of the program that plays tasksets of verifiers, which no episode may wait for."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any, cast

from rlworker.environments.adapters import verifiers

PROGRAM = "import os, sys\nfor _ in range(4): sys.stdin.readline()\nos._exit(1)"
"""Reads the call of each episode, and ends without an answer."""


def test_its_end_fails_all_episodes_though_one_was_at_its_time_limit(monkeypatch):
    monkeypatch.setattr(verifiers, "make_command", lambda *_: (sys.executable, "-c", PROGRAM))
    environment = verifiers.VerifiersEnvironment("", {})
    row: Any = SimpleNamespace(source={"index": 0})

    def begin(number: int) -> asyncio.Task:
        endpoint = SimpleNamespace(base_url="", episode=SimpleNamespace(reward=print))
        policy: Any = SimpleNamespace(number=number, endpoint=lambda row, tool_parser: endpoint)
        return asyncio.ensure_future(cast(Any, environment(policy, row)))

    async def play() -> list:
        late, *others = [begin(number) for number in range(3)]
        await asyncio.sleep(0.2)
        late.cancel()
        others.append(begin(3))  # the fourth call, after which the program ends
        return await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 20.0)

    for error in asyncio.run(play()):
        assert isinstance(error, RuntimeError) and "its program ended; environment.log shows the cause" in str(error)
