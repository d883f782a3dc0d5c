"""Tools under released templates: calls go back as calls, with ids, in process and over the endpoint."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from support.environments.agents import PATIENT, connect
from support.environments.forms import TOOL
from support.environments.released import RELEASED
from support.environments.runners import LocalPool, make_loop

from engines.batch.samples import Completion, Sampling
from engines.vllm.tools import ToolCalls
from rlworker.data.rows import Row
from rlworker.environments import Episode
from rlworker.environments.chat import Chat
from rlworker.environments.codec import Codec
from rlworker.environments.record import ToolCall
from rlworker.environments.tools.calls import answer_calls

ASK, AGAIN = {"role": "user", "content": "What is 1 + 3?"}, {"role": "user", "content": "And 2 + 2?"}
ARGUMENTS = [{"first": 1, "note": "a"}, {"first": 2, "note": "b"}]
MISTRAL = ("Mistral v0.3", "Mistral Nemo")
NAMES = (*MISTRAL, "Qwen2.5", "Qwen3 2507", "Llama 3.1")
pytestmark = pytest.mark.timeout(300)


def spell_calls(name: str, arguments: list[dict]) -> str:
    """Spell calls as the model writes them: without the spaces and the ids with which its template repeats them."""
    texts = [json.dumps({"name": "add", "arguments": each}, separators=(",", ":")) for each in arguments]
    if name in MISTRAL:
        return f"[TOOL_CALLS]{' ' if name == MISTRAL[0] else ''}[{', '.join(texts)}]"
    if name == "Llama 3.1":
        return texts[0].replace("arguments", "parameters")
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def read_calls(text: str) -> ToolCalls:
    """Read calls as vLLM's parsers of these models do."""
    arguments = re.findall(r'"(?:arguments|parameters)":(\{.*?\})', text)
    if not arguments:
        return ToolCalls(text)
    return ToolCalls("", tuple(("add", each) for each in arguments))


class ChatEngines:
    """Stands for rollout engines: says the texts of a script, each ended by the template's end."""

    def __init__(self, codec: Codec, script: list[str]):
        self.codec, self.script, self.streams = codec, script, []

    def sample(self, requests, stream) -> list[Completion]:
        self.streams.append(stream)
        text = self.script[len(self.streams) - 1]
        ids = self.codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = np.asarray([*ids, self.codec.stop_token_ids[0]], np.int32)
        return [Completion(ids, np.zeros(len(ids), np.float32), True, ((0, len(ids)),)) for _ in requests]

    def parse_tools(self, texts, parser, tools) -> list[ToolCalls]:
        assert parser == "hermes" and tools == [TOOL]
        return [read_calls(text) for text in texts]


def make_codec(name: str) -> Codec:
    tokenizer = RELEASED[name].make_tokenizer()
    return Codec(tokenizer, tuple(tokenizer.convert_tokens_to_ids([*RELEASED[name].ends])), vocab=len(tokenizer))


def make_row(codec: Codec, tools: tuple = (TOOL,)) -> Row:
    text = codec.tokenizer.apply_chat_template(
        [ASK], tools=[*tools] or None, tokenize=False, add_generation_prompt=True
    )
    ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Row(text, tuple(ids), "4", {}, (), (ASK,), tools)


def run(environment, codec: Codec, row: Row, script: list[str]):
    """Run one episode, and return its trajectory with the text of each sequence."""
    pool = LocalPool(environment, limits=replace(PATIENT, sample_tokens=400), codec=codec)
    loop = make_loop(pool, ChatEngines(codec, script))
    ((record,),) = loop.wait(loop.begin([row], Sampling(1, 1.0, 400, (), codec.stop_token_ids)))
    for runner in pool.runners:
        runner.close()
    assert record.failure is None, record.failure
    ids = [[int(token) for part in sequence for token in part.token_ids] for sequence in record.sequences]
    return record, [codec.tokenizer.decode(each) for each in ids]


async def add(first: int, note: str) -> int:
    """Awaited in the environment: a process of its own would be late on a busy machine."""
    return first + 3


async def play(policy, row):
    """Play calls to their end, and ask once more."""
    episode = Episode(row, tool_parser="hermes")
    for asked in (None, AGAIN):
        if asked:
            episode.observe([asked])
        while answers := await answer_calls(policy, await policy.sample(episode), {"add": add}):
            episode.observe([{key: each[key] for key in ("role", "content")} for each in answers])
    return episode


async def play_by_calls(policy, row):
    """Play the same as an agent that knows OpenAI's API alone."""
    endpoint = policy.endpoint(row, tool_parser="hermes")
    async with connect(endpoint) as client:
        messages = []
        for asked in (ASK, AGAIN):
            messages.append(asked)
            while True:
                reply = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
                said = reply.choices[0].message
                messages.append(said.model_dump())
                if not said.tool_calls:
                    break
                for call in said.tool_calls:
                    assert re.fullmatch(r"[A-Za-z0-9]{9}", call.id)
                    result = str(await add(**json.loads(call.function.arguments)))
                    messages.append({"role": "tool", "content": result, "tool_call_id": call.id})
    return endpoint.episode


def write_script(name: str, calls: int) -> tuple[list[str], list[dict]]:
    """Write what the model says in four turns, and the messages that it makes with those that it answers."""
    answers = [" It is 4.", " 4 again."] if name == "Mistral v0.3" else ["It is 4.", "4 again."]
    script = [spell_calls(name, ARGUMENTS[:1]), spell_calls(name, ARGUMENTS[:calls]), *answers]
    messages = [ASK]
    for turn, count in enumerate((1, calls)):
        ids = [f"call00{turn}0{number}" for number in range(count)]
        functions = [{"name": "add", "arguments": ARGUMENTS[number]} for number in range(count)]
        made = [{"id": i, "type": "function", "function": each} for i, each in zip(ids, functions, strict=True)]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        messages += [{"role": "tool", "content": str(4 + n), "tool_call_id": each} for n, each in enumerate(ids)]
    messages += [{"role": "assistant", "content": "It is 4."}, AGAIN]
    return script, messages


def squeeze(text: str) -> str:
    """Leave out white space and the ids of calls, in which a model's own spelling differs from the template's."""
    return re.sub(r'\s|,\s*"id": "call\d{5}"', "", text)


@pytest.mark.parametrize("environment", [play, play_by_calls])
@pytest.mark.parametrize("name", NAMES)
def test_an_episode_of_several_calls_is_played_to_its_end(name, environment):
    """Of one call, then two, under templates that refuse results without ids, and that count whose turn it is."""
    calls = 1 if name == "Llama 3.1" else 2
    codec, (script, messages) = make_codec(name), write_script(name, calls)
    record, texts = run(environment, codec, make_row(codec), script)
    assert record.turns == 4 and texts[-1].endswith(script[-1] + codec.tokenizer.decode([codec.stop_token_ids[0]]))
    # Mistral's templates show the tools before the last question, and so rewrite the first once another is asked.
    assert record.forks == len(texts) - 1 == (name in MISTRAL)
    whole = codec.tokenizer.apply_chat_template(messages[:-2], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert squeeze(texts[0]).startswith(squeeze(whole)), "what the template writes of all messages at once"
    whole = codec.tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert squeeze(texts[-1]).startswith(squeeze(whole))
    said = codec.tokenizer.decode(record.completions[1].token_ids)
    assert all(said in text for text in texts), "in both as it was sampled, not as the template spells it"


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_writes_what_the_same_environment_writes(name):
    codec = make_codec(name)
    script, _ = write_script(name, calls=1)
    assert run(play, codec, make_row(codec), script)[1] == run(play_by_calls, codec, make_row(codec), script)[1]


@pytest.mark.parametrize("name", MISTRAL)
def test_a_call_that_cannot_be_read_is_answered_too(name):
    """Its answer has an id, without which the template refuses it."""
    codec = make_codec(name)

    async def environment(policy, row):
        episode = Episode(row, tool_parser="hermes")
        sample = replace(await policy.sample(episode), call_error="it ends")
        episode.observe(await answer_calls(policy, sample, {}))
        await policy.sample(episode)
        return episode

    record, (text,) = run(environment, codec, make_row(codec), ["[TOOL_CALLS][{", "Sorry."])
    assert record.forks == 0 and '"call_id": "call00000"}[/TOOL_RESULTS]Sorry.</s>' in text
    assert "error: the call cannot be read: it ends" in text


@pytest.mark.parametrize("more", ["", "{{ '' if messages[0].role == 'tool_calls' }}"])
def test_a_template_that_reads_no_calls_has_them_as_text(more):
    """Mixtral's first one with tools calls a role so."""
    template = more + "{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}{{ '' if tools }}"
    codec = make_codec("Qwen2.5")
    codec.tokenizer.chat_template = template
    chat = Chat(codec.tokenizer, [ASK], [TOOL], codec.stop_token_ids)
    call = spell_calls("Qwen2.5", ARGUMENTS[:1])
    ids = codec.tokenizer(call)["input_ids"]
    chat.note((*ids, codec.stop_token_ids[0]), [ToolCall("add", ARGUMENTS[0], "call00000")])
    chat.add([{"role": "tool", "content": "4"}])
    assert chat.messages[1] == {"role": "assistant", "content": call}


def test_calls_that_a_template_refuses_go_back_as_text():
    """Llama 3.1's takes one call a turn."""
    codec = make_codec("Llama 3.1")
    chat = Chat(codec.tokenizer, [ASK], [TOOL], codec.stop_token_ids)
    said = "; ".join(spell_calls("Llama 3.1", [each]) for each in ARGUMENTS)
    calls = [ToolCall("add", each, f"call0000{number}") for number, each in enumerate(ARGUMENTS)]
    chat.note((*codec.tokenizer(said)["input_ids"], codec.stop_token_ids[0]), calls)
    addition = chat.add([{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}])
    assert chat.messages[1] == {"role": "assistant", "content": said} and not addition.is_fork
    assert addition.parts[0].count("ipython<|end_header_id|>") == 2


def test_the_chats_copy_of_a_turn_has_its_calls_with_ids_and_the_text_beside_them():
    codec = make_codec("Qwen2.5")
    chat = Chat(codec.tokenizer, [ASK], [TOOL], codec.stop_token_ids)
    call = ToolCall("add", ARGUMENTS[0], "call00000")
    ids = codec.tokenizer("Let me see.\n" + spell_calls("Qwen2.5", ARGUMENTS[:1]))["input_ids"]
    chat.note((*ids, codec.stop_token_ids[0]), [call], "Let me see.")
    addition = chat.add([{"role": "tool", "content": "4"}, {"role": "tool", "content": "5", "tool_call_id": "own"}])
    turn, first, second = chat.messages[1:]
    function = {"name": "add", "arguments": ARGUMENTS[0]}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    assert turn == {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    assert (first["tool_call_id"], second["tool_call_id"]) == ("call00000", "own")
    assert not addition.is_fork and addition.parts[0].startswith("\n<|im_start|>user\n<tool_response>\n4")


@pytest.mark.parametrize("name", ["Qwen2.5", "Mistral Nemo"])
def test_the_rows_tools_are_shown_and_an_environments_own_win(name):
    codec, other = make_codec(name), TOOL | {"function": TOOL["function"] | {"name": "sub"}}

    async def environment(policy, row):
        episode = Episode(row, tools=row.source["tools"], tool_parser="hermes" if row.source["parses"] else "")
        await policy.sample(episode)
        return episode

    for tools, shown, notes in (
        ((), "add", ()),
        ((TOOL,), "add", ()),
        ((other,), "sub", ("environment: it shows the tools sub in place of the row's, add",)),
    ):
        row = replace(make_row(codec), source={"tools": tools, "parses": shown == "add"})
        record, (text,) = run(environment, codec, row, ["4"])
        assert f'"name": "{shown}"' in text and text.count('"name": ') == 1 and record.notes == notes
        assert (record.sequences[0][0].token_ids is row.prompt_ids) is (shown == "add")


def test_a_begun_answer_is_continued_in_an_episode_and_goes_back_whole():
    codec = make_codec("Qwen2.5")

    async def environment(policy, row):
        episode = Episode(row, [ASK, {"role": "assistant", "content": "The sum"}])
        await policy.sample(episode)
        episode.observe([AGAIN])
        await policy.sample(episode)
        return episode

    record, (text,) = run(environment, codec, make_row(codec, ()), [" is 4.", "4 again."])
    said = {"role": "assistant", "content": "The sum is 4."}
    whole = codec.tokenizer.apply_chat_template([ASK, said, AGAIN], tokenize=False, add_generation_prompt=True)
    assert record.forks == 0 and text == whole + "4 again.<|im_end|>"
