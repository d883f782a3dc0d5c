"""Calls of OpenAI's client become turns: by the ids that were sampled, forked where an agent rewrites its history."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.environments import runners
from support.environments.agents import (
    ASK,
    PATIENT,
    TOOL,
    make_chat_codec,
    make_chat_row,
    play,
    run,
    tell_chat,
)
from support.environments.chat import QWEN3
from support.environments.runners import EOS
from support.environments.tokenizers import make_tokenizer

from engines.batch.samples import Completion
from rlworker.environments import Episode
from rlworker.environments.codec import Codec
from rlworker.environments.endpoint import conversation
from rlworker.environments.endpoint.protocol import ChatBody, TextBody
from rlworker.environments.endpoint.replies import complete
from rlworker.environments.record import Sample

CHAT = [ASK, {"role": "user", "content": "Sure?"}, {"role": "user", "content": "ok"}]
START, GO_ON = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
pytestmark = pytest.mark.timeout(300)


def say_call(prompt, number):
    """Call a tool twice in the first turn, then say how many tokens there are."""
    calls = [json.dumps({"name": "add", "arguments": {"a": a}}) for a in (1, 2)]
    marked = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return f"so {marked}" if number == 0 else str(len(prompt) % 10)


async def chat_along(client, endpoint, **options):
    """Play three turns; every answer goes back as the client has it."""
    messages, replies = [], []
    for asked in CHAT:
        replies.append(await client.chat.completions.create(model="any", messages=[*messages, asked], **options))
        messages += [asked, replies[-1].choices[0].message.model_dump()]
    return replies


async def sample_along(policy, row):
    """Play the same as an environment."""
    episode = Episode(row)
    for asked in CHAT:
        if asked is not ASK:
            episode.observe([asked])
        await policy.sample(episode)
    episode.reward(1)
    return episode


@pytest.mark.parametrize("lose", [{}, {1: 0}, {0: -1, 2: 1}], ids=["none", "at an episode", "at none, at another"])
def test_an_agent_writes_what_the_same_environment_writes_though_its_process_is_lost(lose):
    in_process = run(sample_along, [make_chat_row(), make_chat_row()])
    by_calls = play(chat_along, chat_along, lose=lose)
    assert [record.failure for record in by_calls] == [None, None]
    for ours, theirs in zip(by_calls, in_process, strict=True):
        assert tell_chat(ours) == tell_chat(theirs) and ours.completions == theirs.completions
        assert (ours.rewards, ours.forks, ours.turns) == (theirs.rewards, 0, 3)


def test_a_reply_has_the_ids_and_logprobs_that_were_sampled():
    replies = []

    async def agent(client, endpoint):
        replies.extend(await chat_along(client, endpoint, logprobs=True, extra_body={"return_token_ids": True}))

    (record,) = play(agent)
    contexts = np.cumsum([len(segment.token_ids) for segment in record.sequences[0]])[::2]
    for reply, completion, context in zip(replies, record.completions, contexts, strict=True):
        (choice,) = reply.choices
        assert choice.token_ids == completion.token_ids.tolist() and len(reply.prompt_token_ids) == context
        assert [token.logprob for token in choice.logprobs.content] == completion.logprobs.tolist()
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content + "<eos>"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (context, len(completion.token_ids))
        assert choice.finish_reason == "stop" and choice.message.content.startswith("~")


def test_where_history_is_rewritten_the_episode_forks_and_keeps_what_was_sampled_before():
    """The first exchange is dropped; the second answer stands in the new context by its ids, behind a question that has
    the same text. The tokenizer raises where it is asked to encode it."""

    async def agent(client, endpoint):
        await chat_along(client, endpoint)
        said = [{"role": "user", "content": "Say 5."}, {"role": "assistant", "content": "~5"}, ASK]
        await client.chat.completions.create(model="", messages=said)

    (record,) = play(agent, say=lambda ids, number: "515"[number % 3])
    first, second = record.sequences
    assert record.forks == 1 and [segment.turn for segment in second] == [-1, 3]
    whole = f"{START}Say 5.{GO_ON}~5<|im_end|>\n{START}{ASK['content']}{GO_ON}"
    assert tell_chat(record)[1][0] == (-1, whole)
    assert [segment.turn for segment in first] == [-1, 0, -1, 1, -1, 2]


@pytest.mark.parametrize("asked", ["~1 or ~2", "1 or 2"])
def test_an_answer_that_was_changed_is_text_and_all_others_are_ids(asked):
    """A client's own text is encoded: with the mark of what was sampled in it, the tokenizer raises and the call is
    refused."""
    heard = []

    async def agent(client, endpoint):
        from openai import BadRequestError

        (first, *_) = await chat_along(client, endpoint)
        said = [ASK, first.choices[0].message.model_dump(), ASK, {"role": "assistant", "content": asked}, ASK]
        try:
            await client.chat.completions.create(model="", messages=said)
        except BadRequestError as error:
            heard.append(error.param)

    (record,) = play(agent, say=lambda ids, number: "12"[number % 2])
    if asked.startswith("~"):
        assert heard == ["messages"] and record.turns == 3
    else:
        assert not heard and record.turns == 4 and f"{asked}<|im_end|>" in tell_chat(record)[1][0][1]


def test_a_template_that_drops_thinking_forks():
    async def agent(client, endpoint):
        await chat_along(client, endpoint)

    (record,) = play(agent, say=lambda ids, number: f"<think>\nhm\n</think>\n\n{number}", template=QWEN3)
    assert record.forks == 2 and record.turns == 3 and record.failure is None


def test_choices_are_turns_and_any_may_be_gone_on_from():
    async def agent(client, endpoint):
        reply = await client.chat.completions.create(model="", messages=[ASK], n=3)
        assert [choice.message.content for choice in reply.choices] == ["~0", "~1", "~2"]
        assert reply.usage.completion_tokens == 9
        for place in (2, 0):
            said = [ASK, reply.choices[place].message.model_dump(), CHAT[1]]
            await client.chat.completions.create(model="", messages=said)

    (record,) = play(agent, say=lambda ids, number: str(number))
    assert [[segment.turn for segment in segments] for segments in record.sequences] == [
        [-1, 0],
        [-1, 1],
        [-1, 2, -1, 3],
        [-1, 4],
    ]
    assert tell_chat(record)[3][0][1].startswith(f"{START}{ASK['content']}{GO_ON}~0<|im_end|>")


def test_tools_are_called_and_their_results_go_on_from_the_call():
    async def agent(client, endpoint):
        options = dict(model="", tools=[TOOL])
        reply = await client.chat.completions.create(messages=[ASK], **options)
        said, calls = reply.choices[0].message, reply.choices[0].message.tool_calls
        assert reply.choices[0].finish_reason == "tool_calls" and said.content == "~so "
        assert [(call.id, json.loads(call.function.arguments)) for call in calls] == [
            ("call00000", {"a": 1}),
            ("call00001", {"a": 2}),
        ]
        written = [  # as a framework writes it down again
            {"id": call.id, "type": "function", "function": {"name": "add", "arguments": f'{{"a":  {number + 1}}}'}}
            for number, call in enumerate(calls)
        ]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in calls]
        messages = [ASK, {"role": "assistant", "content": "~so", "tool_calls": written}, *results]
        reply = await client.chat.completions.create(messages=messages, tool_choice="auto", **options)
        assert reply.choices[0].finish_reason == "stop" and reply.choices[0].message.tool_calls is None

    (record,) = play(agent, say=say_call)
    (written,) = tell_chat(record)
    assert record.forks == 0 and [turn for turn, _ in written] == [-1, 0, -1, 1]
    assert '"name": "add"' in written[0][1] and written[2][1].count("<tool_response>\n2\n</tool_response>") == 2


@pytest.mark.parametrize(
    ("options", "calls"), [({"parallel_tool_calls": False}, 1), ({"tool_choice": "none"}, 0)], ids=["one", "none"]
)
def test_calls_may_be_held_to_one_or_left_as_text(options, calls):
    async def agent(client, endpoint):
        reply = await client.chat.completions.create(model="", messages=[ASK], tools=[TOOL], **options)
        said = reply.choices[0].message
        assert len(said.tool_calls or ()) == calls and ("<tool_call>" in said.content) == (not calls)

    assert play(agent, say=say_call)[0].failure is None


@pytest.mark.parametrize("say", [say_call, lambda ids, number: "12"], ids=["calls", "text"])
def test_a_stream_has_what_a_whole_reply_has(say):
    async def agent(client, endpoint):
        options = dict(model="", messages=[ASK], tools=[TOOL], logprobs=True)
        stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        chunks = [chunk async for chunk in stream]
        text, calls, end, logprobs = "", {}, None, []
        for chunk in chunks:
            for choice in chunk.choices:
                text, end = text + (choice.delta.content or ""), choice.finish_reason or end
                logprobs += choice.logprobs.content if choice.logprobs else []
                calls |= {call.index: (call.id, call.function.name) for call in choice.delta.tool_calls or ()}
        (record,) = endpoint.episode.sequences
        assert len(logprobs) == len(record[1].token_ids) and chunks[-1].usage.completion_tokens == len(logprobs)
        if say is say_call:
            assert text == "~so " and calls == {0: ("call00000", "add"), 1: ("call00001", "add")}
            assert end == "tool_calls"
        else:
            assert (text, end, calls) == ("~12", "stop", {})

    assert play(agent, say=say)[0].failure is None


def test_text_completions_go_on_by_text_or_by_ids():
    encode = make_chat_codec().tokenizer._tokenizer

    async def by_text(client, endpoint):
        prompt = make_chat_row().prompt
        for add in ("", " then", "; "):
            prompt += add
            reply = await client.completions.create(model="", prompt=prompt, logprobs=0, max_tokens=5)
            prompt += reply.choices[0].text
        assert reply.choices[0].logprobs.token_logprobs == [-3, -2, -1]
        await client.completions.create(model="", prompt="another")

    async def by_ids(client, endpoint):
        prompt = list(make_chat_row().prompt_ids)
        for add in ("", " then", "; "):
            prompt += encode(add)["input_ids"]
            reply = await client.completions.create(model="", prompt=prompt, extra_body={"return_token_ids": True})
            prompt += reply.choices[0].token_ids
        await client.completions.create(model="", prompt=encode("another")["input_ids"])

    for record in play(by_text, by_ids, say=lambda ids, number: str(number)):
        assert record.failure is None
        first = [
            (-1, make_chat_row().prompt),
            (0, "~0<eos>"),
            (-1, " then"),
            (1, "~1<eos>"),
            (-1, "; "),
            (2, "~2<eos>"),
        ]
        assert tell_chat(record) == [
            first,
            [(-1, "another"), (3, "~3<eos>")],
        ]


def test_a_text_that_goes_on_behind_its_stop_has_the_stop_once():
    async def agent(client, endpoint):
        prompt = "Q:"
        for _ in range(2):
            reply = await client.completions.create(model="", prompt=prompt, stop=[";"])
            prompt += reply.choices[0].text + ";A:"

    (record,) = play(agent, say=lambda ids, number: f"{number};")
    assert tell_chat(record) == [[(-1, "Q:"), (0, "~0;"), (-1, "A:"), (1, "~1;")]]


def test_a_choice_behind_an_empty_one_has_the_same_context(monkeypatch):
    empty = Completion(np.asarray([EOS], np.int32), -np.ones(1, np.float32), True, ((0, 1),))
    monkeypatch.setattr(runners, "make_sample", lambda text: empty)

    async def agent(client, endpoint):
        reply = await client.completions.create(model="", prompt="Q:", n=2)
        assert [choice.text for choice in reply.choices] == ["", ""]

    (record,) = play(agent)
    assert tell_chat(record) == [[(-1, "Q:"), (0, "<eos>")], [(-1, "Q:"), (1, "<eos>")]]


@pytest.mark.parametrize("kind", ["llama2", "mistral", "qwen"])
def test_tokens_of_logprobs_join_to_the_text_that_was_sampled(kind, monkeypatch):
    tokenizer = make_tokenizer(kind)
    codec, text = Codec(tokenizer, (tokenizer.eos_token_id,)), "is the answer \u2603"
    monkeypatch.setattr(conversation, "get_codec", lambda: codec)
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
    sample = Sample(text, ids, True, logprobs=-np.ones(len(ids)))
    choices = []
    for body in (ChatBody(messages=[ASK], logprobs=True), TextBody(prompt="x", logprobs=0)):
        turn = conversation.Conversation._read(SimpleNamespace(episode=SimpleNamespace(turns=1)), sample, body, (), 3)
        choices += complete(body, [turn], "1-a")["choices"]
    told, tokens = choices[0]["logprobs"]["content"], choices[1]["logprobs"]["tokens"]
    assert tokens[: len(tokens) - 3] == [each["token"] for each in told][:-3] and tokens[-3:] == ["\ufffd"] * 3
    assert "".join(tokens[:-3]) == text[:-1], "the last three are bytes of one character"
    assert [each["bytes"] for each in told][-4:] == [[*tokens[-4].encode()], None, None, None]
    starts = choices[1]["logprobs"]["text_offset"]
    assert [text[start : start + len(token)] for start, token in zip(starts, tokens[:-3])] == tokens[:-3]


def test_calls_at_once_are_answered_in_their_order():
    async def agent(client, endpoint):
        calls = [client.chat.completions.create(model="", messages=[{"role": "user", "content": c}]) for c in "abc"]
        replies = []
        for call in calls:
            replies.append(asyncio.ensure_future(call))
            await asyncio.sleep(0.05)
        said = [reply.choices[0].message.content for reply in await asyncio.gather(*replies)]
        assert said == ["~0", "~1", "~2"]

    (record,) = play(agent, say=lambda ids, number: str(number))
    assert [said[0][1] for said in tell_chat(record)] == [f"{START}{letter}{GO_ON}" for letter in "abc"]


def test_a_stop_ends_a_sample_and_is_no_part_of_its_text():
    async def agent(client, endpoint):
        reply = await client.chat.completions.create(model="", messages=[ASK], stop=["4", "3"], max_tokens=7)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("~12", "stop")

    (record,) = play(agent, say=lambda ids, number: "1234")
    assert tell_chat(record)[0][1] == (0, "~123"), "it belongs to the sample"


def test_a_client_in_a_thread_plays_too():
    async def environment(policy, row):
        from openai import OpenAI

        def talk():
            with OpenAI(base_url=endpoint.base_url, api_key="-") as client:
                return client.chat.completions.create(model="", messages=[ASK]).choices[0].message.content

        endpoint = policy.endpoint(row)
        endpoint.episode.reward(float(await asyncio.to_thread(talk) == "~2"))
        return endpoint.episode

    (record,) = run(environment, [make_chat_row()], say=lambda ids, number: "2")
    assert record.failure is None and record.reward == 1.0


def test_an_episode_without_a_call_has_no_sample():
    async def agent(client, endpoint):
        models = await client.models.list()
        assert [model.id for model in models.data] == ["policy"]

    (record,) = play(agent)
    assert record.failure and record.failure[0] == "no_generation"


def test_an_episode_has_one_endpoint():
    async def environment(policy, row):
        policy.endpoint(row)
        policy.endpoint(row)

    (record,) = run(environment, [make_chat_row()])
    assert record.failure and "endpoint: this episode has one; call policy.endpoint once" in record.failure[1]


def test_images_are_read_from_messages():
    """A model without vision says so; what is no image in the message is refused."""
    heard = []

    async def agent(client, endpoint):
        from openai import BadRequestError

        for url in ("data:image/png;base64,iVBORw0KGgo=", "https://example.org/a.png"):
            parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}]
            try:
                await client.chat.completions.create(model="", messages=[{"role": "user", "content": parts}])
            except BadRequestError as error:
                heard.append(error.message)
        await chat_along(client, endpoint)

    (record,) = play(agent)
    assert "got images for a model without vision" in heard[0] and "expected data:image" in heard[1]
    assert record.failure is None and record.forks == 0 and PATIENT.turns > record.turns == 3
