"""The bodies of requests that the endpoint takes, and the errors that it answers with.

A field that OpenAI has and that is missing here is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

CONTEXT_LIMIT = "context_length_exceeded"
"""OpenAI's code of a request that is longer than the model's context."""
_NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "top_logprobs": 0,
    "best_of": 1,
    "echo": False,
    "suffix": "",
}
"""Parameters that change what is sampled, or ask for numbers that the run does not keep: name -> the one value that it
may have. A run's own settings take the place of the first two."""


class ApiError(Exception):
    """A call that is refused.

    Attributes:
        status: the HTTP status. code: the error's name. param: the field of the body at fault; None for others.
        document: OpenAI's form of the error.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request_error", param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.document = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Message(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]  pydantic's own name
    role: Required[Annotated[str, Field(min_length=1)]]
    content: str | list[dict[str, Any]] | None
    tool_calls: list[dict[str, Any]] | None


class Function(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]  pydantic's own name
    name: Required[Annotated[str, Field(min_length=1)]]
    description: str | None
    parameters: dict[str, Any] | None


class Tool(TypedDict):
    type: Literal["function"]
    function: Function


class _Body(BaseModel):
    """Fields that both kinds of completions have."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = "policy"
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None


class ChatBody(_Body):
    """Body of a request for a chat completion."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class TextBody(_Body):
    """Body of a request for a text completion."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


Body = ChatBody | TextBody


def read_body(kind: type[ChatBody] | type[TextBody], body: bytes, drawing: Mapping[str, float]) -> Body:
    """Read the JSON of a request.

    Args:
        drawing: settings by which the run samples.

    Raises:
        ApiError: it is no JSON, a field is unknown or of a wrong type, or it asks for another distribution than the
            run's, which training computes.
    """
    try:
        read = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    for name in read.model_fields_set & _NEUTRAL.keys():
        expected = drawing.get(name, _NEUTRAL[name])
        if (value := getattr(read, name)) not in (None, expected):
            raise ApiError(
                400,
                f"{name}: got {value!r:.80}, expected {expected!r}: the run samples and trains its own distribution; "
                "leave it out",
                param=name,
            )
    choice = read.tool_choice if isinstance(read, ChatBody) else None
    if choice not in (None, "auto", "none"):
        message = (
            f"tool_choice: got {choice!r:.80}, expected auto or none: a forced call is not what the policy samples"
        )
        raise ApiError(400, message, param="tool_choice")
    if isinstance(read, TextBody) and read.logprobs:
        raise ApiError(400, "logprobs: expected 0, the logprobs of sampled tokens alone", param="logprobs")
    return read


def _explain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    place = [str(part) for part in first["loc"]]
    where = ".".join(place)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg']}", "invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{where}: this endpoint has no such parameter; leave it out", param=place[0])
    return ApiError(400, f"{where or 'the body'}: {first['msg']}", param=place[0] if place else None)
