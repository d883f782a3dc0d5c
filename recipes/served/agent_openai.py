"""GRPO on an agent of the ``openai`` client with two tools: it calculates, and hands in the answer to a question.

    python -m recipes.served.agent_openai --model FOLDER    an instruct model that writes calls as Hermes and Qwen do
    python -m recipes.served.agent_openai --smoke           the same recipe, tiny, on a CPU

The agent is any program that talks to OpenAI's API: it gets a base URL, and each of its calls is a turn that is
trained. In full, which is untested: eight training ranks and four vLLM engines, each on a device of 80 GB.
"""

import ast
import operator
from collections.abc import Callable
from dataclasses import replace

from recipes import grpo_gsm8k
from recipes.common.agents import connect, play_with_tools
from recipes.common.mathematics import math_reward
from recipes.common.smoke import parse_recipe_config
from rlworker import AlgorithmConfig, Episode, Policy, Row, launch

TURNS = 8
SYSTEM = "Solve the question. Call calculate for every sum, and answer at the end with the number alone."
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(node: ast.expr) -> float:
    """Compute an expression of numbers and the four operators.

    Raises:
        ValueError: it has anything else. ZeroDivisionError: it divides by zero.
    """
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.BinOp(left=left, op=act, right=right) if type(act) in OPERATORS:
            return OPERATORS[type(act)](evaluate(left), evaluate(right))
    raise ValueError("write numbers, + - * / and brackets")


async def calculate(expression: str) -> str:
    """Compute an arithmetic expression."""
    try:
        return f"{evaluate(ast.parse(str(expression).strip(), mode='eval').body):.12g}"
    except (ArithmeticError, RecursionError, SyntaxError, ValueError) as error:
        return f"error: {error}"


def describe(name: str, description: str, argument: str) -> dict:
    """Make the schema of a tool with one argument, a text."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS = [
    describe("calculate", "Compute an expression of numbers, + - * / and brackets.", "expression"),
    describe("answer", "Hand in the final answer, a number.", "number"),
]


async def play(policy: Policy, row: Row) -> Episode:
    """Play a question: the answer is what was handed in, else the last text."""
    endpoint, answers = policy.endpoint(row, tool_parser="hermes"), []

    async def answer(number: str) -> str:
        """Note the answer."""
        answers.append(str(number))
        return "noted"

    tools = {"calculate": calculate, "answer": answer}
    said = await play_with_tools(connect(endpoint), row.messages, SCHEMAS, tools, TURNS)
    endpoint.episode.answer = (answers or [said])[-1]
    endpoint.episode.reward(math_reward(endpoint.episode.answer, row))
    return endpoint.episode


DEFAULT = replace(
    grpo_gsm8k.DEFAULT,
    run_dir="runs/agent_openai",
    data=replace(grpo_gsm8k.DEFAULT.data, instruction=SYSTEM),
    rollout=replace(grpo_gsm8k.DEFAULT.rollout, max_new_tokens=512, max_model_len=4096),
    algorithm=AlgorithmConfig(mini_batches=4),
    environment=replace(grpo_gsm8k.DEFAULT.environment, turns=TURNS, tokens=4096),
)

if __name__ == "__main__":
    launch(parse_recipe_config(DEFAULT, __doc__), play)
