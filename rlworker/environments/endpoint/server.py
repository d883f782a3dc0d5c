"""The HTTP server of a process that runs environments: one for all of its episodes, in a thread of its own.

Each episode has a path with a token that nobody can guess. A call is read and written here; what it adds to its episode
and the sampling happen in the event loop of the environments.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

import uvicorn

from rlworker.environments.endpoint import replies
from rlworker.environments.endpoint.conversation import ENDED, Call, Conversation, Turn
from rlworker.environments.endpoint.protocol import ApiError, Body, ChatBody, TextBody, read_body
from rlworker.environments.episode import Episode
from rlworker.environments.policy import Endpoint, EpisodeLimits, Policy

if TYPE_CHECKING:
    from rlworker.data.rows import Row
from rlworker.environments.user_code import describe_error

LOGGER = logging.getLogger(__name__)
LARGEST_BODY = 8 << 20
"""Most bytes of a request."""
_MOST_READ = 64 << 20
"""Bytes of a larger request after which it is cut off."""
_KINDS: dict[str, type[ChatBody] | type[TextBody]] = {"/chat/completions": ChatBody, "/completions": TextBody}
_JSON, _EVENTS = b"application/json", b"text/event-stream"
_CLOSE_S = 5.0
"""Seconds to wait until the server's thread has ended."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class EndpointServer:
    """Serves the calls of agents, and answers them from the conversations of episodes.

    Args:
        loop: the event loop in which the environments run. host: address at which it listens.

    Raises:
        ValueError: this machine has no such address.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str):
        self._loop, self._secret = loop, secrets.token_bytes(32)
        self._sessions: dict[str, tuple[Conversation, Context]] = {}
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a call takes two files, its client's and ours
        try:
            listening = socket.create_server((host, 0), backlog=2048)
        except OSError as error:
            raise ValueError(
                f"endpoint: cannot listen at {host!r} ({error}); pass policy.endpoint an address of each node, such as "
                "0.0.0.0"
            ) from error
        name = _find_address() if host == "0.0.0.0" else host
        self.address = f"http://{name}:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            self._serve,
            log_config=None,
            access_log=False,
            interface="asgi3",
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=3600,  # an agent may think for long between two calls
            timeout_graceful_shutdown=1,
        )
        self._server, self._count = uvicorn.Server(config), 0
        arguments = dict(sockets=[listening])
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, name="endpoint", daemon=True)
        Context().run(self._thread.start)  # or the episode that asked first would be that of every call

    def open(self, conversation: Conversation) -> str:
        """Open the path of an episode, whose environment calls this, and return its base URL."""
        self._count += 1
        token = f"{self._count:x}-{self._sign(f'{self._count:x}')}"
        self._sessions[token] = conversation, copy_context()
        conversation.close_session = lambda: self._sessions.pop(token, None) and None
        return f"{self.address}/{token}/v1"

    def close(self) -> None:
        """End the server; calls that are open are cut off."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_CLOSE_S)

    def _sign(self, number: str) -> str:
        return hmac.new(self._secret, number.encode(), "sha256").hexdigest()[:32]

    # -- in the server's thread

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        status, kind, headers = 200, _JSON, []
        try:
            body, kind = await self._respond(scope["method"], scope["path"], receive)
        except ApiError as error:
            status, body = error.status, json.dumps(error.document).encode()
            if status == 405:
                headers.append((b"allow", error.code.encode()))
        headers += [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _respond(self, method: str, path: str, receive: Receive) -> tuple[bytes, bytes]:
        raw = await _read(receive)  # first, since many clients send all of it before they listen
        _, _, rest = path.partition("/")
        token, slash, rest = rest.partition("/v1")
        if not slash or "/" in token:
            raise ApiError(404, f"there is no {path!r:.200}; the address is http://HOST:PORT/EPISODE/v1", "not_found")
        conversation, context = self._find(token)
        is_read = rest in ("/models", "/openapi.json")
        if not is_read and rest not in _KINDS:
            raise ApiError(404, f"there is no /v1{rest!r:.200}", "not_found")
        if method != (allowed := "GET" if is_read else "POST"):
            raise ApiError(405, f"{method} is not allowed here, {allowed} is", allowed)
        if is_read:
            document = replies.MODELS if rest == "/models" else replies.describe(f"{self.address}/{token}/v1")
            return json.dumps(document).encode(), _JSON
        body = read_body(_KINDS[rest], raw, conversation.limits.drawing)
        turns = await self._answer(conversation, context, body, rest.encode() + raw, receive)
        if not turns:  # the client went away before it was its turn
            return b"", _JSON
        if body.stream:
            return replies.stream(body, turns, token), _EVENTS
        return json.dumps(replies.complete(body, turns, token)).encode(), _JSON

    def _find(self, token: str) -> tuple[Conversation, Context]:
        if session := self._sessions.get(token):
            return session
        number, _, signature = token.partition("-")
        if hmac.compare_digest(signature.encode(), self._sign(number).encode()):
            raise ApiError(410, ENDED, "episode_ended")
        raise ApiError(
            401, "there is no episode of this token; take the base URL as the endpoint has it", "invalid_api_key"
        )

    async def _answer(
        self, conversation: Conversation, context: Context, body: Body, raw: bytes, receive: Receive
    ) -> list[Turn]:
        """Have a call answered in the loop of the environments, and watch whether the client goes away."""
        ours = asyncio.get_running_loop()
        answer: asyncio.Future[list[Turn]] = ours.create_future()

        def settle(turns: list[Turn] | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error:
                answer.set_exception(error)
            else:
                answer.set_result(turns or [])

        call = Call(body, raw, lambda error: ours.call_soon_threadsafe(settle, None, error) and None)

        def finish(task: asyncio.Task) -> None:
            error = ApiError(410, ENDED, "episode_ended") if task.cancelled() else task.exception()
            if error and not isinstance(error, ApiError):
                LOGGER.error("endpoint: a call failed", exc_info=error)
                error = ApiError(500, describe_error(error), "server_error")
            ours.call_soon_threadsafe(settle, None if error else task.result(), error)

        def begin() -> None:
            self._loop.create_task(conversation.answer(call)).add_done_callback(finish)

        async def watch() -> None:
            await receive()  # after the body there is only the end
            call.is_abandoned = True

        self._loop.call_soon_threadsafe(begin, context=context)
        watching = ours.create_task(watch())
        try:
            return await answer
        finally:
            watching.cancel()


class Endpoints:
    """The servers of a process, one for each address at which an environment wants to be called.

    Args:
        loop: the event loop in which the environments run. limits: limits of each episode.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: EpisodeLimits):
        self._loop, self._limits = loop, limits
        self._servers: dict[str, EndpointServer] = {}

    def open(self, policy: Policy, row: Row, tool_parser: str, host: str) -> tuple[Endpoint, Conversation]:
        """Open the endpoint of a policy's episode, as ``Policy.endpoint`` says."""
        if host not in self._servers:
            self._servers[host] = EndpointServer(self._loop, host)
        conversation = Conversation(policy, Episode(row), tool_parser, self._limits)
        return Endpoint(self._servers[host].open(conversation), conversation.episode), conversation

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def _find_address() -> str:
    """Find the address by which other machines reach this one; loopback where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # which sends nothing
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


async def _read(receive: Receive) -> bytes:
    """Read the body of a request. One that is too large is read to its end, too.

    Raises:
        ApiError: it is too large, or the client went away.
    """
    parts, size, goes_on = [], 0, True
    while goes_on and size <= _MOST_READ:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body was cut off")
        part, goes_on = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size <= LARGEST_BODY:
            parts.append(part)
    if size > LARGEST_BODY:
        raise ApiError(413, f"the body has more than {LARGEST_BODY} bytes", "body_too_large")
    return b"".join(parts)
