"""A taskset of the real verifiers package, in a Python of its own, is played by its own harness through an endpoint.

``VERIFIERS_PYTHON`` names that interpreter, where it is not the one that ``scripts/setup.sh verifiers`` makes.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.environments.agents import PATIENT, make_chat_row, run, tell_chat

PYTHON = os.environ.get("VERIFIERS_PYTHON", ".venv-verifiers/bin/python")
pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not Path(PYTHON).exists(), reason=f"there is no {PYTHON}: bash scripts/setup.sh verifiers makes it"
    ),
]
TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str = ""

class Sum(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(trace.assistant_messages[-1].content == "~" + self.data.answer)

class Sums(vf.Taskset[Sum]):
    def load(self):
        for number in range(8):
            print("a taskset may print")
            yield Sum(SumData(prompt=f"{number}+1=", answer=str(number + 1)), self.config.task)

__all__ = ["Sums"]
"""
SETTINGS = {"taskset": {"id": "sums_v1"}, "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}


@pytest.fixture
def environment(tmp_path):
    from rlworker.environments.adapters.verifiers import VerifiersEnvironment

    (tmp_path / "sums_v1.py").write_text(TASKSET)
    return VerifiersEnvironment(PYTHON, SETTINGS, tasksets=str(tmp_path))


def test_tasks_are_played_side_by_side_and_rewarded_by_their_own_functions(environment):
    from rlworker.environments.adapters.verifiers_program import make_command

    command = *make_command(PYTHON, SETTINGS, environment.tasksets), "rows"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in found] == [f"{number}+1=" for number in range(8)]
    rows = [replace(make_chat_row(), source={"index": index}) for index in (0, 1, 2, 1)]
    records = run(environment, rows, lambda ids, number: "2", replace(PATIENT, time_limit_s=200.0))
    assert [(record.failure, record.reward) for record in records] == [
        (None, 0.0),
        (None, 1.0),
        (None, 0.0),
        (None, 1.0),
    ]
    assert ["1+1=" in tell_chat(record)[0][0][1] for record in records] == [False, True, False, True]
    assert all(record.turns == 1 and record.forks == 0 for record in records)


@pytest.mark.product
def test_a_taskset_that_is_not_there_fails_by_its_name(environment):
    wrong = replace(environment, settings={**SETTINGS, "taskset": {"id": "nothing_v1"}})
    (record,) = run(wrong, [replace(make_chat_row(), source={"index": 0})], limits=replace(PATIENT, time_limit_s=100.0))
    assert record.failure and record.failure[0] == "raised" and "environment.log shows the cause" in record.failure[1]
