"""The documents that the endpoint answers with: completions, whole or as events, models, and its OpenAPI document."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from rlworker.environments.endpoint.conversation import Turn
from rlworker.environments.endpoint.protocol import Body, ChatBody, TextBody

MODEL = "policy"
"""Name of the model in the list of models; calls may name any."""
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rlworker"}]}
"""The list of the one model that there is."""


def complete(body: Body, turns: Sequence[Turn], token: str) -> dict[str, Any]:
    """Make the answer to a call of its turns, one choice each."""
    is_chat = isinstance(body, ChatBody)
    choices = []
    for index, turn in enumerate(turns):
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": _list_logprobs(body, turn),
            "finish_reason": _name_end(turn),
        }
        choice |= {"message": _make_message(turn)} if is_chat else {"text": turn.text}
        choices.append(choice | _list_ids(body, turn))
    reply = _frame(body, turns, token, "chat.completion" if is_chat else "text_completion")
    if is_chat and body.return_token_ids:
        reply["prompt_token_ids"] = turns[0].prompt_ids
    return reply | {"choices": choices, "usage": _count(turns)}


def stream(body: Body, turns: Sequence[Turn], token: str) -> bytes:
    """Make the server-sent events of a call: a turn is sampled whole, and all of its events come at once."""
    is_chat, events = isinstance(body, ChatBody), []
    frame = _frame(body, turns, token, "chat.completion.chunk" if is_chat else "text_completion")
    for index, turn in enumerate(turns):
        logprobs, end = _list_logprobs(body, turn), _name_end(turn)
        if not is_chat:
            choice = {"index": index, "text": turn.text, "logprobs": logprobs, "finish_reason": end}
            events.append(frame | {"choices": [choice | _list_ids(body, turn)]})
            continue
        said = _make_message(turn)
        deltas = [{"role": "assistant", "content": ""}, {"content": said["content"]}] if said["content"] else []
        deltas = deltas or [{"role": "assistant", "content": None}]
        for place, call in enumerate(said.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": place} | call]})
        for place, delta in enumerate(deltas):
            known = {"logprobs": logprobs} | _list_ids(body, turn) if place == len(deltas) - 1 else {}
            events.append(frame | {"choices": [{"index": index, "delta": delta, "finish_reason": None} | known]})
        events.append(frame | {"choices": [{"index": index, "delta": {}, "finish_reason": end}]})
    if body.stream_options and body.stream_options.include_usage:
        events.append(frame | {"choices": [], "usage": _count(turns)})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"


def _frame(body: Body, turns: Sequence[Turn], token: str, kind: str) -> dict[str, Any]:
    name = f"cmpl-{token.partition('-')[0]}-{turns[0].number}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": body.model}


def _make_message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None if turn.calls else turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, name, arguments in turn.calls
        ]
    return message


def _name_end(turn: Turn) -> str:
    if turn.calls:
        return "tool_calls"
    return "stop" if turn.sample.finished else "length"


def _count(turns: Sequence[Turn]) -> dict[str, int]:
    """Count the tokens of a call."""
    prompt = turns[0].prompt_ids if isinstance(turns[0].prompt_ids, int) else len(turns[0].prompt_ids)
    sampled = sum(len(turn.sample.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _list_ids(body: Body, turn: Turn) -> dict[str, Any]:
    """List the ids of context and sample, where the call asks for them, by vLLM's names."""
    if not body.return_token_ids:
        return {}
    context = {} if isinstance(body, ChatBody) else {"prompt_token_ids": turn.prompt_ids}
    return context | {"token_ids": turn.sample.token_ids.tolist()}


def _list_logprobs(body: Body, turn: Turn) -> dict[str, Any] | None:
    """List the logprobs of a sample; None where the call asks for none, or it was sampled greedily."""
    values = turn.sample.logprobs
    if body.logprobs is None or body.logprobs is False or values is None or not len(values):
        return None
    numbers = values.tolist()
    if isinstance(body, ChatBody):
        content = []
        for text, number in zip(turn.tokens, numbers, strict=True):
            whole = None if "\ufffd" in text else list(text.encode())  # a part of a character has no text
            content.append({"token": text, "logprob": number, "bytes": whole, "top_logprobs": []})
        return {"content": content, "refusal": None}
    starts = [0]
    for text in turn.tokens[:-1]:
        starts.append(starts[-1] + len(text))
    return {"tokens": list(turn.tokens), "token_logprobs": numbers, "top_logprobs": None, "text_offset": starts}


_ERRORS = {
    400: "a field is wrong or refused, or the call goes past a limit of the episode",
    401: "no episode has this token",
    410: "the episode has ended",
    413: "the body is too large",
}


def describe(base_url: str) -> dict[str, Any]:
    """Make the OpenAPI document of an episode's address."""
    schemas: dict[str, Any] = {
        "Error": _ERROR,
        "Completion": {"type": "object", "required": ["id", "choices", "usage"]},
    }
    paths: dict[str, Any] = {}
    for path, kind in (("/chat/completions", ChatBody), ("/completions", TextBody)):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        answer = {"schema": {"$ref": "#/components/schemas/Completion"}}
        answers = {"application/json": answer, "text/event-stream": {}}
        done = {"200": {"description": "the sampled turns", "content": answers}}
        body = {"required": True, "content": content}
        paths[path] = {
            "post": {"operationId": kind.__name__, "requestBody": body, "responses": done | _refuse(*_ERRORS)}
        }
    listed = {"application/json": {"schema": {"type": "object", "required": ["object", "data"]}}}
    done = {"200": {"description": "the one model", "content": listed}}
    paths["/models"] = {"get": {"operationId": "models", "responses": done | _refuse(401, 410)}}
    information = {"title": "The endpoint of an episode", "version": "1"}
    return {
        "openapi": "3.1.0",
        "info": information,
        "servers": [{"url": base_url}],
        "paths": paths,
        "components": {"schemas": schemas},
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}


def _refuse(*statuses: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}
