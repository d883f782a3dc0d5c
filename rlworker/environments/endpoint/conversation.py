"""The calls of one episode's endpoint: what they add to the episode, and the turns that are sampled for them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlworker.data.chat.messages import flatten_content
from rlworker.data.chat.templates import load_arguments, reads_field
from rlworker.environments.codec import get_codec
from rlworker.environments.endpoint.protocol import CONTEXT_LIMIT, ApiError, Body, ChatBody, TextBody
from rlworker.environments.episode import Episode
from rlworker.environments.policy import EpisodeLimit, EpisodeLimits, Policy
from rlworker.environments.record import Sample

ENDED = "this episode has ended: its environment has returned, failed or was out of time"


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn, as the client is told of it.

    Attributes:
        number: of the turn in its episode, from 0. sample: its tokens.
        text: decoded text, without the stop that ended it and without calls.
        calls: for each tool call, its id, the name of the tool, and the arguments as JSON.
        prompt_ids: ids ``[P]`` of the context, where the client asks for them; else their number.
        tokens: text of each id, where the client asks for logprobs.
    """

    number: int
    sample: Sample
    text: str
    calls: tuple[tuple[str, str, str], ...]
    prompt_ids: int | list[int]
    tokens: tuple[str, ...] = ()


@dataclass(eq=False)
class Call:
    """A call that is being answered.

    Attributes:
        body: of the request. raw: its bytes, by which a call is known that is made again.
        fail: answers the call with an error at once.
        is_abandoned: whether the client went away before it was answered.
        task: answers it.
    """

    body: Body
    raw: bytes
    fail: Callable[[ApiError], None]
    is_abandoned: bool = False
    task: asyncio.Task | None = None


class Conversation:
    """The calls of one episode, which are answered one after another as they came.

    ``answer`` runs in the event loop of the episode's environment.

    Args:
        policy: samples the turns. episode: is written by them. limits: of the episode.
        tool_parser: name of vLLM's parser for the model's tool calls; empty where calls have no tools.

    Attributes:
        limit: the limit that a call was refused for last; None where none was.
        close_session: is called where the episode has ended.
    """

    def __init__(self, policy: Policy, episode: Episode, tool_parser: str, limits: EpisodeLimits):
        episode.show_tools(episode.row.tools, tool_parser)  # which checks its name
        self.episode, self.limits, self.limit = episode, limits, None
        self.close_session: Callable[[], None] = lambda: None
        self._policy, self._parser, self._lock = policy, tool_parser, asyncio.Lock()
        self._open: set[Call] = set()
        self._missed: dict[bytes, list[Turn]] = {}  # turns of calls that nobody heard the answer of
        self._history: list[Any] | str | None = None  # with which a call begins that goes on
        self._stop = ""  # text of the stop behind a text history, which the episode has and the client's text has not
        self._answers: list[tuple[Any, str, list[int]]] = []  # of each turn: message, raw text, ids
        self._refusal = ""  # why calls are refused

    def close(self) -> None:
        """Refuse the calls that are open and all that come later: the episode has ended."""
        self._refusal = ENDED
        self.close_session()
        for call in self._open:
            call.fail(ApiError(410, ENDED, "episode_ended"))
            if call.task:
                call.task.cancel()

    async def answer(self, call: Call) -> list[Turn]:
        """Sample the turns of a call, ``n`` of them.

        Raises:
            ApiError: the call cannot be answered.
        """
        call.task = asyncio.current_task()
        self._open.add(call)
        try:
            async with self._lock:
                if self._refusal:
                    raise ApiError(410, self._refusal, "episode_ended")
                if call.is_abandoned:
                    return []
                if call.raw in self._missed:
                    return self._missed.pop(call.raw)
                turns = await self._take_turns(call.body)
                if call.is_abandoned:
                    self._missed[call.raw] = turns
                return turns
        finally:
            self._open.discard(call)

    async def _take_turns(self, body: Body) -> list[Turn]:
        try:
            stops = get_codec().encode_stops(body.stop or ())
        except ValueError as error:
            raise ApiError(400, str(error), param="stop") from None
        count = body.n or 1
        if self.episode.turns + count > self.limits.turns:
            self.limit = EpisodeLimit(
                f"turn {self.episode.turns + count} of at most {self.limits.turns}; raise --environment.turns"
            )
            raise ApiError(400, str(self.limit), "turn_limit_exceeded")
        return [await self._take_turn(body, stops) for _ in range(count)]

    async def _take_turn(self, body: Body, stops: tuple[int, ...]) -> Turn:
        try:
            written = self._write_messages(body) if isinstance(body, ChatBody) else self._write_prompt(body)
        except ApiError:
            raise
        except Exception as error:  # whatever a chat template raises on messages that a client made up
            message = f"the context cannot be written: {type(error).__name__}: {error}"
            raise ApiError(400, message, param="messages" if isinstance(body, ChatBody) else "prompt") from error
        episode, most = self.episode, body.max_tokens
        if isinstance(body, ChatBody):
            most = body.max_completion_tokens or most
        episode.logprobs = body.logprobs is not None and body.logprobs is not False
        prompt_ids = episode.token_ids if body.return_token_ids else len(episode)
        try:
            sample = await self._policy.sample(episode, max_tokens=most, stop=stops)
        except EpisodeLimit as limit:
            self.limit = limit
            raise ApiError(400, str(limit), CONTEXT_LIMIT) from limit
        except RuntimeError as error:  # it has ended
            self._refusal = self._refusal or str(error)
            raise ApiError(410, self._refusal, "episode_ended") from error
        turn = self._read(sample, body, stops, prompt_ids)
        if isinstance(written, str):
            (whole,) = get_codec().decode_all([sample.token_ids], False)
            self._history = written + turn.text
            self._stop = whole[len(turn.text) :] if whole.startswith(turn.text) else ""
        elif written is not None:
            calls = [{"function": {"name": name, "arguments": text}} for _, name, text in turn.calls]
            message = _key({"role": "assistant", "content": turn.text, "tool_calls": calls})
            self._history = [*written, message]
            (raw,) = get_codec().decode_samples([sample.token_ids])
            self._answers.append((message, raw, sample.token_ids.tolist()))
        return turn

    def _read(self, sample: Sample, body: Body, stops: tuple[int, ...], prompt_ids: int | list[int]) -> Turn:
        codec, number, ids, text = get_codec(), self.episode.turns - 1, sample.token_ids, sample.text
        tokens: tuple[str, ...] = ()
        if sample.logprobs is not None:
            alone = codec.decode_all([*ids[:, None]], False)
            # Behind the one before it, since tokenizers such as Llama's drop the space that a text begins with.
            pairs = codec.decode_all([*np.stack([ids[:-1], ids[1:]], axis=1)], False)
            later = zip(pairs, alone, alone[1:])  # parts of a character are no text
            tokens = (*alone[:1], *((p.startswith(last) and p[len(last) :]) or own for p, last, own in later))
        if len(ids) and ids[-1] in (*codec.stop_token_ids, *stops):
            text = codec.decode(ids[:-1])  # also of an end that is no special token
        if not sample.calls:
            return Turn(number, sample, text, (), prompt_ids, tokens)
        calls = sample.calls[:1] if isinstance(body, ChatBody) and body.parallel_tool_calls is False else sample.calls
        made = [(call.id, call.name, json.dumps(call.arguments)) for call in calls]
        return Turn(number, sample, sample.content, tuple(made), prompt_ids, tokens)

    # -- what calls write

    def _write_messages(self, body: ChatBody) -> list[Any]:
        """Write the messages of a call to the episode, and return them as they are compared with those of the next."""
        messages: list[dict] = [{name: value for name, value in m.items() if value is not None} for m in body.messages]
        for message in messages:
            if message["role"] == "developer":  # which chat templates call so
                message["role"] = "system"
        keys, episode = [_key(message) for message in messages], self.episode
        tools = tuple(body.tools) if body.tools else episode.row.tools
        parser = self._parser if body.tools and body.tool_choice != "none" else ""
        if body.tools and not self._parser:
            raise ApiError(
                400, "tools: name the model's tool parser: policy.endpoint(row, tool_parser=...)", param="tools"
            )
        known = self._history if isinstance(self._history, list) and tools == episode.tools else None
        sampled, begins = {}, 0
        if known is not None and len(keys) > len(known) and keys[: len(known)] == known:
            begins = len(known)
        else:
            sampled = self._restore(messages, keys)
        try:
            loaded = [dict(load_arguments(message)) for message in messages[begins:]]
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None
        written, images = _split_images(loaded)
        if tools != episode.tools:
            episode.show_tools(tools, self._parser)
        episode.tool_parser, self._history = parser, None  # none to go on from, where what follows fails
        if begins:
            episode.observe(written, images)
        elif not self._is_new or tools != episode.row.tools or images or written != [*episode.row.messages]:
            episode.fork(written, images, sampled=sampled)
        return keys

    def _restore(self, messages: list[dict], keys: Sequence[Any]) -> dict[int, Sequence[int]]:
        """Give answers of the model that a history repeats the text that was sampled, and return their ids."""
        sampled, first = {}, 0
        is_read = reads_field(get_codec().tokenizer, "tool_calls")  # else the calls stand in the text alone
        for number, key in enumerate(keys):
            if messages[number]["role"] != "assistant":
                continue
            found = [i for i, (answer, _, _) in enumerate(self._answers) if answer == key]
            if found:
                # The same may have been said twice: the first that follows the answer before it.
                place = next((i for i in found if i >= first), found[-1])
                _, text, sampled[number] = self._answers[place]
                first = place + 1
                if not (messages[number].get("tool_calls") and is_read):
                    messages[number] = {"role": "assistant", "content": text}
        return sampled

    def _write_prompt(self, body: TextBody) -> str | None:
        """Write the prompt of a call to the episode, and return its text, with which the next may begin."""
        prompt, episode = body.prompt, self.episode
        history, self._history, episode.tool_parser = self._history, None, ""
        if isinstance(prompt, list):
            known = episode.token_ids
            if episode.turns and prompt[: len(known)] == known:
                episode.observe(prompt[len(known) :])
            elif episode.turns or prompt != known:
                episode.fork(prompt)
            return None
        if isinstance(history, str) and prompt.startswith(history) and prompt != history:
            episode.observe(prompt[len(history) :].removeprefix(self._stop))
        elif not self._is_new or prompt != episode.row.prompt:
            episode.fork(prompt)
        return prompt

    @property
    def _is_new(self) -> bool:
        """True where the episode is the row's prompt and nothing else."""
        first, *others = self.episode.sequences[0]
        return not self.episode.turns and not others and first.token_ids is self.episode.row.prompt_ids


def _key(message: Mapping[str, Any]) -> Any:
    """Return a message as it is compared: of the assistant's, what was said, however a client writes it down again."""
    if message["role"] != "assistant":
        return message
    content = message.get("content")
    text = flatten_content(content) if isinstance(content, list) else content
    return "assistant", (text or "").strip(), [_read_call(call) for call in message.get("tool_calls") or ()]


def _read_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    try:
        return function.get("name"), json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return function.get("name"), function.get("arguments")


def _split_images(messages: list[dict]) -> tuple[list[dict], list[bytes]]:
    """Return messages with a marker in the place of each image, as chat templates take them, and the images."""
    images = []
    for number, message in enumerate(messages):
        if not isinstance(content := message.get("content"), list):
            continue
        parts = []
        for part in content:
            if part.get("type") == "image_url":
                images.append(_read_image(part.get("image_url")))
                part = {"type": "image"}
            parts.append(part)
        messages[number] = {**message, "content": parts}
    return messages, images


def _read_image(value: Any) -> bytes:
    """Read an image that is written into a message."""
    url = value.get("url") if isinstance(value, Mapping) else value
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    try:
        if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
            raise ValueError
        return base64.b64decode(data)
    except ValueError:
        raise ApiError(
            400, f"messages: got the image {url!r:.80}, expected data:image/...;base64,...", param="messages"
        ) from None
