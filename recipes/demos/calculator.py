"""A language model learns to calculate with a tool, over three turns and from the reward alone.

``47*6+85=`` -> it calls the calculator with ``47*6``, reads ``282``, calls it with ``282+85``, reads ``367``, answers
``367``. Calls are written as Hermes and Qwen write them, by a chat template with tools, and read by vLLM's parser. What
the tool returns is context and never trained. Held-out questions are never trained on.
"""

import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from recipes.common import addition
from recipes.common.toys import Toy, run_toy
from recipes.common.worked_episodes import EpisodeToyConfig, warm_up_on_worked_episodes
from rlworker import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    Episode,
    MegatronConfig,
    OptimizerConfig,
    Policy,
    Row,
    Trainer,
    VllmConfig,
    answer_calls,
)

TURNS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Multiply or add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


async def calculate(expression: str) -> str:
    """Multiply or add two whole numbers."""
    return compute(expression)


def compute(expression: str) -> str:
    """Compute a product or a sum of two whole numbers; a question mark for all else."""
    found = re.fullmatch(r"(\d{1,5})([*+])(\d{1,5})", expression)
    if not found:
        return "?"
    a, b = int(found[1]), int(found[3])
    return str(a * b if found[2] == "*" else a + b)


async def ask_calculator(policy: Policy, row: Row) -> Episode:
    """Answer the model's calls until it says something that is none."""
    episode = Episode(row, tools=[TOOL], tool_parser="hermes")
    tool = mislead if row.source.get("misled") else calculate
    for _ in range(TURNS):
        sample = await policy.sample(episode)
        if not (answers := await answer_calls(policy, sample, {"calculate": tool})):
            episode.answer = sample.text
            episode.reward(float(sample.text == row.answer))
            break
        episode.observe(answers)
    return episode


async def mislead(expression: str) -> str:
    """Return a number that has nothing to do with the expression, always the same of it."""
    return str(zlib.crc32(expression.encode()) % 900 + 10)


def measure_misled(trainer: Trainer) -> dict[str, float]:
    """Measure how often held-out questions are answered right where the tool's results are wrong: how far the model
    does without it."""
    rows = [replace(row, source=row.source | {"misled": True}) for row in trainer.heldout[""]]
    values = trainer.manager.score_greedy(rows).values
    return {"heldout_misled": sum(values) / len(values)}


CALL, CALL_END = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
TOKENS = (CALL, CALL_END, "calculate", "<|user|>", "<|assistant|>", "<|tool|>")
"""Tokens beyond one per character: a call is what has to be chosen, and two tokens around it."""
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name + eos_token }}{% endfor %}
{%- for message in messages %}
{%- set content = '?' if message.content.startswith('error') else message.content %}
{{- '<|' + message.role + '|>' + content + eos_token }}
{%- endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}"""


def say_next(row: Row, turn: int) -> str:
    """Say the call of a turn, or at last the answer."""
    product, _, addend = row.messages[0]["content"].strip("=").partition("+")
    expression = (product, f"{compute(product)}+{addend}", None)[turn]
    return row.answer if expression is None else f"{CALL}{expression}{CALL_END}"


def make_model(folder: Path, seed: int) -> Path:
    """Save the demo's Qwen3 with a tokenizer for calls and a chat template that shows tools."""
    from transformers import AddedToken

    addition.make_model(folder, seed)
    tokenizer = addition.make_tokenizer(TEMPLATE)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    tokenizer.save_pretrained(folder)
    return folder


def make_data(folder: Path) -> Path:
    """Write questions a*b+c of a and c in 10..99 and b in 2..9; a tenth is held out, by a hash."""
    generator, questions = np.random.default_rng(0), {}
    while len(questions) < 6000:
        a, b, c = (int(generator.integers(low, high)) for low, high in ((10, 100), (2, 10), (10, 100)))
        questions[f"{a}*{b}+{c}="] = str(a * b + c)
    rows: dict[str, list[dict]] = {"train": [], "heldout": []}
    for question, answer in questions.items():
        part = rows["train" if zlib.crc32(question.encode()) % 10 else "heldout"]
        part.append({"prompt": [{"role": "user", "content": question}], "answer": answer})
    return addition.write_rows(folder, rows | {"heldout": rows["heldout"][:256]})


_WARM_UP = dict(lr=1e-3, lr_warmup_steps=20, lr_scheduler="constant", adam_beta2=0.99)
CALCULATOR = Toy(
    make_data,
    make_model,
    warm_up_on_worked_episodes(ask_calculator, say_next, _WARM_UP),
    ask_calculator,
    measure_misled,
)
DEFAULT = EpisodeToyConfig(
    run_dir="runs/calculator",
    data=DataConfig(max_prompt_tokens=16),
    actor=MegatronConfig(
        ranks=2,
        optimizer=OptimizerConfig(lr=2e-4, min_lr=2e-5, lr_scheduler="linear", lr_warmup_steps=10, adam_beta2=0.99),
    ),
    # Far below 1: embeddings that are tied and young give flat logits, so that the right call is the likeliest long
    # before it is likely. Warmed up at this temperature, what wins greedily is sampled now and then.
    rollout=VllmConfig(temperature=0.15, max_new_tokens=12, max_model_len=96, max_num_seqs=1024, kv_cache_mb=256),
    environment=EnvironmentConfig(turns=TURNS, tokens=96),
    # Without some entropy nearly every group soon has one reward, and a seed stays at 0.84.
    algorithm=AlgorithmConfig(mini_batches=4, clip_high=0.28, entropy_coef=0.003),
    warm_up_success=0.25,
    steps=60,
    prompts_per_step=128,
    samples_per_prompt=8,
    eval_every=10,
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, CALCULATOR)
