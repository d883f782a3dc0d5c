"""The demo ``calculator``, played by an agent that knows nothing of training: the ``openai`` client over HTTP.

Rows, model, warm-up and rewards are those of ``recipes/demos/calculator.py``.
"""

from collections.abc import Callable
from dataclasses import replace

from openai import AsyncOpenAI

from recipes.common.agents import connect, play_with_tools
from recipes.common.toys import run_toy
from recipes.demos import calculator
from recipes.demos.calculator import CALCULATOR, TOOL, TURNS, calculate, mislead
from rlworker import Episode, Policy, Row
from rlworker.environments.policy import Endpoint


async def play(policy: Policy, row: Row, connect: Callable[[Endpoint], AsyncOpenAI] = connect) -> Episode:
    """Answer the model's calls until it says something that is none."""
    endpoint = policy.endpoint(row, tool_parser="hermes")
    tools = {"calculate": mislead if row.source.get("misled") else calculate}
    text = await play_with_tools(connect(endpoint), row.messages, [TOOL], tools, TURNS)
    if text:
        endpoint.episode.answer = text
        endpoint.episode.reward(float(text == row.answer))
    return endpoint.episode


CALCULATOR_OPENAI = replace(CALCULATOR, learn_from=play)
DEFAULT = replace(calculator.DEFAULT, run_dir="runs/calculator_openai")

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, CALCULATOR_OPENAI)
