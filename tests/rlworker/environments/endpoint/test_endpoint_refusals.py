"""What the endpoint refuses, each by a code and a message; the episode, its neighbours and the run go on."""

import asyncio
import json
from dataclasses import replace

import pytest
from support.environments.agents import ASK, PATIENT, connect, make_chat_row, play, run

from rlworker.environments.endpoint.server import LARGEST_BODY

BODY = {"model": "policy", "messages": [ASK]}
pytestmark = pytest.mark.timeout(300)


async def send(url: str, body: bytes, *headers: str, method: str = "POST", pause_s: float = 0.0):
    """Send a request byte by byte as told: status and document of the answer."""
    host, _, path = url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = [f"{method} /{path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    if not any("chunked" in header for header in headers):
        head.append(f"Content-Length: {len(body)}")
    writer.write("\r\n".join([*head, "", ""]).encode())
    for start in range(0, len(body), size := 10 if pause_s else 1 << 16):
        writer.write(body[start : start + size])
        await writer.drain()
        await asyncio.sleep(pause_s)
    answer = await reader.read()
    writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(rest) if rest else {}, top.decode().lower()


def ask(url: str, **changes):
    return send(f"{url}/chat/completions", json.dumps(BODY | changes).encode())


REFUSED = {
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "top_logprobs": 3,
    "tool_choice": "required",
    "guided_json": {},
    "n": 0,
    "max_tokens": "5",
    "stop": "12",
    "messages": [],
    "tools": [{"type": "function", "function": {}}],
}


def test_a_field_that_changes_what_is_sampled_is_refused_by_its_name():
    heard = {}

    async def agent(client, endpoint):
        for name, value in REFUSED.items():
            status, document, _ = await ask(endpoint.base_url, **{name: value})
            heard[name] = status, document["error"]
        neutral = dict(temperature=0.7, top_p=1, presence_penalty=0, logit_bias={}, user="me", seed=3, stop=None)
        status, _, _ = await ask(endpoint.base_url, **neutral, response_format={"type": "text"})
        assert status == 200

    (record,) = play(agent, limits=replace(PATIENT, drawing={"temperature": 0.7, "top_p": 1.0}))
    assert record.failure is None and record.turns == 1 and record.forks == 0
    for name, (status, error) in heard.items():
        assert status == 400 and error["param"] == name and name in error["message"], (name, error)
        assert error["type"] == "invalid_request_error"
    assert (
        "got 0.5, expected 0.7: the run samples and trains its own distribution" in heard["temperature"][1]["message"]
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is no JSON"),
        (b"\xff\xfe", "the body is no JSON"),
        (b"[1]", "the body"),
        (b"", "the body is no JSON"),
        (b'{"messages": [{"content": "1"}]}', "messages.0.role: Field required"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages.0.content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "sound"}]}]}', "must have content of text or parts"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "the body is no JSON"),
        (b'{"messages": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "the body is no JSON"),
        (
            b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}]}',
            "the arguments of a tool call are no JSON",
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_body_that_is_none_is_refused_and_the_episode_goes_on(body, message):
    async def agent(client, endpoint):
        status, document, _ = await send(f"{endpoint.base_url}/chat/completions", body)
        assert status == 400 and message in document["error"]["message"], document
        await client.chat.completions.create(**BODY)

    (record,) = play(agent)
    assert record.failure is None and record.turns == 1 and record.forks == 0


def test_a_body_of_ten_megabytes_is_refused_however_it_comes():
    async def agent(client, endpoint):
        from openai import APIStatusError

        assert LARGEST_BODY < 10**7
        with pytest.raises(APIStatusError) as refused:
            await client.chat.completions.create(model="", messages=[ASK | {"content": "x" * 10**7}])
        assert refused.value.status_code == 413 and "more than 8388608 bytes" in refused.value.message
        part = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        url = f"{endpoint.base_url}/chat/completions"
        status, document, _ = await send(url, part * 10 + b"0\r\n\r\n", "Transfer-Encoding: chunked")
        assert status == 413 and document["error"]["code"] == "body_too_large"
        await client.chat.completions.create(**BODY)

    assert play(agent)[0].failure is None


def test_tokens_paths_and_methods_that_are_none_are_told_apart():
    first, urls = asyncio.Event(), []

    async def short(client, endpoint):
        urls.append(endpoint.base_url)
        await client.chat.completions.create(**BODY)

    async def agent(client, endpoint):
        url = endpoint.base_url
        root, _, token = url.removesuffix("/v1").rpartition("/")
        wrong = [
            f"{root}/{token[:-1]}{'0' if token[-1] != '0' else '1'}/v1",
            f"{root}/0-{'0' * 32}/v1",
            f"{root}/%FF/v1",
        ]
        for other in wrong:
            status, document, _ = await ask(other)
            assert (status, document["error"]["code"]) == (401, "invalid_api_key")
        for path in ("", "/v1", f"/{token}", f"/{token}/v1/embeddings", f"/{token}/v1x"):
            assert (await send(f"{root}{path}", b"{}"))[0] == 404
        status, _, head = await send(f"{url}/chat/completions", b"", method="GET")
        assert status == 405 and "allow: post" in head
        for _ in range(2):
            await client.chat.completions.create(**BODY)
        (other,) = {*urls} - {url}
        status, document, _ = await ask(other)
        assert status == 410 and "this episode has ended" in document["error"]["message"]
        status, document, _ = await send(f"{url}/openapi.json", b"", method="GET")
        assert status == 200 and document["servers"] == [{"url": url}]
        assert {*document["components"]["schemas"]["ChatBody"]["properties"]} >= {"messages", "tools", "n", "stream"}
        first.set()

    records = play(short, agent)
    assert [record.failure for record in records] == [None, None] and first.is_set()
    assert [record.turns for record in records] == [1, 2]


@pytest.mark.parametrize(
    ("limits", "code"),
    [(dict(turns=2), "turn_limit_exceeded"), (dict(tokens=60), "context_length_exceeded")],
    ids=["turns", "tokens"],
)
@pytest.mark.parametrize("is_caught", [True, False])
def test_a_limit_is_told_and_an_agent_that_does_not_heed_it_fails_by_it(limits, code, is_caught):
    async def agent(client, endpoint):
        from openai import BadRequestError

        messages = [ASK]
        try:
            for _ in range(9):
                reply = await client.chat.completions.create(model="", messages=messages)
                messages += [reply.choices[0].message.model_dump(), ASK]
        except BadRequestError as error:
            assert error.code == code and "raise --environment." in error.message
            if not is_caught:
                raise

    (record,) = play(agent, limits=replace(PATIENT, **limits))
    assert 1 <= record.turns <= 3 and all(segments[-1].turn >= 0 for segments in record.sequences)
    if is_caught:
        assert record.failure is None and record.reward == 1.0
    else:
        assert record.failure and record.failure[0] == "limit" and "BadRequestError" in record.failure[1]


def test_what_a_client_did_not_hear_it_may_ask_for_again():
    """Two clients go away while they wait; the third asks the same and hears the turn that was sampled for the first,
    since a call that is made again is the same call."""
    said = []

    async def agent(client, endpoint):
        for _ in range(2):
            sending = asyncio.ensure_future(client.chat.completions.create(**BODY))
            await asyncio.sleep(0.1)
            sending.cancel()
            await asyncio.sleep(0.1)
        said.append((await client.chat.completions.create(**BODY)).choices[0].message.content)
        assert endpoint.episode.turns == 1

    async def slow(client, endpoint):  # holds the round open, in which no sample comes
        await asyncio.sleep(0.5)
        await client.chat.completions.create(**BODY)

    records = play(agent, slow, say=lambda ids, number: str(number))
    assert said == ["~0"] and [record.failure for record in records] == [None, None]
    assert [record.turns for record in records] == [1, 1]


def test_a_call_that_is_open_as_the_episode_ends_is_refused_at_once():
    heard = []

    async def environment(policy, row):
        endpoint = policy.endpoint(row)
        if row.source["ends"]:
            asking.append(asyncio.ensure_future(ask(endpoint.base_url)))
            await asyncio.sleep(0.2)
            return endpoint.episode
        await asyncio.sleep(0.3)
        heard.append(await asking[0])
        async with connect(endpoint) as client:
            await client.chat.completions.create(**BODY)
        return endpoint.episode

    asking = []
    rows = [replace(make_chat_row(), source={"ends": ends}) for ends in (True, False)]
    records = run(environment, rows)
    ((status, document, _),) = heard
    assert status == 410 and "this episode has ended" in document["error"]["message"]
    assert records[0].failure[0] == "no_generation" and records[1].failure is None


def test_it_listens_where_it_is_told_to():
    """At every address, named by that of the machine; an address that the machine lacks is refused."""

    async def agent(client, endpoint):
        assert not endpoint.base_url.startswith("http://0.0.0.0")
        await client.chat.completions.create(**BODY)

    assert play(agent, host="0.0.0.0")[0].failure is None
    (record,) = play(agent, host="203.0.113.1")
    assert record.failure and "endpoint: cannot listen at '203.0.113.1'" in record.failure[1]


def test_a_slow_client_holds_nobody_up():
    async def slow(client, endpoint):
        status, _, _ = await send(f"{endpoint.base_url}/chat/completions", json.dumps(BODY).encode(), pause_s=0.05)
        assert status == 200

    async def quick(client, endpoint):
        for _ in range(3):
            await client.chat.completions.create(**BODY)

    assert [record.failure for record in play(slow, quick)] == [None, None]


def test_an_agent_that_goes_another_way_when_it_runs_again_is_answered_anew():
    tries = []

    async def agent(client, endpoint):
        tries.append([])
        for said in ([ASK, {"role": "user", "content": str(len(tries))}], [ASK]):
            status, document, _ = await ask(endpoint.base_url, messages=said)
            tries[-1].append((status, document["choices"][0]["message"]["content"]))

    (record,) = play(agent, lose={1: -1}, say=lambda ids, number: str(number))
    assert tries == [[(200, "~0")], [(200, "~1"), (200, "~2")]]
    assert record.failure is None and record.turns == 2


def test_a_fault_of_ours_is_told_in_the_same_form(monkeypatch):
    from rlworker.environments.endpoint.conversation import Conversation

    async def agent(client, endpoint):
        monkeypatch.setattr(Conversation, "_read", lambda *_: 1 / 0)
        status, document, _ = await ask(endpoint.base_url)
        assert status == 500 and document["error"]["type"] == "server_error"
        assert "ZeroDivisionError" in document["error"]["message"]

    assert play(agent)[0].failure is None
