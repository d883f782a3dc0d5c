"""Agents that play episodes by an endpoint, over real HTTP, while engines answer from a script."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
from support.environments.chat import QWEN2_5, make_chat_tokenizer
from support.environments.runners import EOS, LIMITS, Engines, LocalPool, make_loop, say_length

from engines.batch.samples import Completion, Request, Sampling
from engines.vllm.tools import ToolCalls
from rlworker.data.rows import Row
from rlworker.environments.codec import Codec
from rlworker.environments.policy import Endpoint, EpisodeLimits, Policy
from rlworker.environments.record import Trajectory

if TYPE_CHECKING:
    from openai import AsyncOpenAI

PATIENT = replace(LIMITS, turns=8, tokens=4000, time_limit_s=100.0)
ASK = {"role": "user", "content": "1+1, ok?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
Agent = Callable[["AsyncOpenAI", Endpoint], Awaitable[Any]]


@cache
def make_chat_codec(template: str = QWEN2_5) -> Codec:
    """Make a codec whose tokenizer raises where it is asked to encode what was sampled."""
    tokenizer = make_chat_tokenizer(template)
    return Codec(tokenizer, (EOS, tokenizer.convert_tokens_to_ids("<|im_end|>")), vocab=len(tokenizer))


def make_chat_row(*messages: Mapping, template: str = QWEN2_5) -> Row:
    tokenizer, asked = make_chat_codec(template).tokenizer, messages or (ASK,)
    text = tokenizer.apply_chat_template([*asked], tokenize=False, add_generation_prompt=True)
    return Row(
        text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), "2", {}, (), tuple(map(dict, asked))
    )


class ToolEngines(Engines):
    """Ends samples at the stops of each request, and reads calls as Hermes writes them, as vLLM does."""

    def sample(self, requests: Sequence[Request], stream: tuple[int, ...]) -> list[Completion]:
        found = []
        for request, whole in zip(requests, super().sample(requests, stream), strict=True):
            ends = [i for i, token in enumerate(whole.token_ids.tolist()) if token in request.sampling.stop_token_ids]
            size = min([*(end + 1 for end in ends), len(whole.token_ids)])
            spans = ((whole.version, size),)
            found.append(replace(whole, token_ids=whole.token_ids[:size], logprobs=whole.logprobs[:size], spans=spans))
        return found

    def parse_tools(self, texts: Sequence[str], parser: str, tools: list) -> list[ToolCalls]:
        assert parser == "hermes" and tools == [TOOL]
        found = [[json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text)] for text in texts]
        calls = [tuple((call["name"], json.dumps(call["arguments"])) for call in each) for each in found]
        return [ToolCalls(text.partition("<tool_call>")[0], each) for text, each in zip(texts, calls, strict=True)]


def connect(endpoint: Endpoint) -> AsyncOpenAI:
    """Make a client as any agent has it; what it would retry is an error here, and it reads no certificates."""
    from openai import AsyncOpenAI

    http = httpx.AsyncClient(verify=False, timeout=100.0)
    return AsyncOpenAI(base_url=endpoint.base_url, api_key="-", max_retries=0, http_client=http)


def play(
    *agents: Agent,
    say: Callable = say_length,
    limits: EpisodeLimits = PATIENT,
    lose: Mapping[int, int] | None = None,
    template: str = QWEN2_5,
    host: str = "127.0.0.1",
) -> list[Trajectory]:
    """Play one episode with each agent, all at once, with a reward of 1: their trajectories."""

    async def environment(policy: Policy, row: Row):
        endpoint = policy.endpoint(row, tool_parser="hermes", host=host)
        async with connect(endpoint) as client:
            await row.source["agent"](client, endpoint)
        endpoint.episode.reward(1)
        return endpoint.episode

    row = make_chat_row(template=template)
    rows = [replace(row, source={"agent": agent}) for agent in agents]
    return run(environment, rows, say, limits, lose, make_chat_codec(template))


def run(
    environment: Any,
    rows: Sequence[Row],
    say: Callable = say_length,
    limits: EpisodeLimits = PATIENT,
    lose: Mapping[int, int] | None = None,
    codec: Codec | None = None,
) -> list[Trajectory]:
    """Run an environment's episode of each row in turns: their trajectories."""
    pool = LocalPool(environment, limits=limits, lose=lose, codec=codec or make_chat_codec())
    loop = make_loop(pool, ToolEngines(say))
    loop.note_lost(lambda lost: None, 60.0)
    groups = loop.wait(loop.begin(rows, Sampling(1, 1.0, 8, (), (EOS,))))
    for runner in pool.runners:
        runner.close()
    return [trajectory for group in groups for trajectory in group]


def tell_chat(record: Trajectory) -> list[list[tuple[int, str]]]:
    """Tell who wrote what: turn and text of each segment, sequence by sequence."""
    decode = make_chat_codec().tokenizer.decode
    return [[(segment.turn, decode(segment.token_ids)) for segment in segments] for segments in record.sequences]
