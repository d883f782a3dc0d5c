"""An episode: tokens in the order in which they were written, and the author of each.

Tokens go in and tokens come out. Samples are kept by their ids and never encoded again; only the environment's text
goes through the tokenizer.
"""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlworker.config.sections import LARGEST_REWARD
from rlworker.data.rows import Row
from rlworker.environments.codec import Content, get_codec, list_messages, split_images
from rlworker.environments.record import CONTEXT, FailureKind, Segment, ToolCall

if TYPE_CHECKING:  # an episode that goes on from its row without messages loads nothing of chats
    from rlworker.environments.chat import Chat


class RewardError(ValueError):
    """A reward that is not a number, or is too large.

    Attributes:
        kind: ``not_a_number``, ``too_large``, or ``wrong_count`` for a call that returned too many or too few numbers.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind: FailureKind = kind


class Episode:
    """The tokens that an environment and the policy have written so far; an environment makes one and returns it.

    It begins with the row's prompt and images. ``Policy.sample`` appends the model's tokens, which are trained;
    ``observe`` appends the environment's tokens, which are context::

        episode = Episode(row)
        sample = await policy.sample(episode)
        episode.observe(look_up(sample.text))
        sample = await policy.sample(episode)
        episode.reward(float(sample.text == row.answer))

    Args:
        row: the question.
        prompt: ids, text or chat messages to begin with instead of the row's prompt. Text is preceded by the special
            tokens with which the tokenizer begins a text, as a row's prompt is.
        images: images of that prompt.
        tools: tools that the chat template shows to the model: JSON schemas, or functions of which transformers makes
            schemas: with types, and a Google-style docstring that describes each argument under ``Args:``. Without any,
            the row's own prompt shows the row's tools.
        tool_parser: name of vLLM's parser for this model's tool calls, such as ``hermes``; it fills ``Sample.calls``.

    Attributes:
        row: the question.
        logprobs: whether samples come with their logprobs, which takes as much memory again as their ids. An
            environment may set it.
        turns: number of samples so far.
        forks: number of times that a new sequence was begun because the context was rewritten.
        sequences: the segments of each sequence; every fork begins a new sequence.
        rewards: for each reward, the turn (``CONTEXT`` before the first sample) and the value.
        answer: the final answer as text. An environment that sets it lets validation vote on answers (maj@k).
        parts: name of a part of the reward -> its value, for the metric ``reward_NAME_mean`` and the report.
        notes: what the user is told of, once a run.
    """

    def __init__(
        self,
        row: Row,
        prompt: Content | None = None,
        *,
        images: Sequence[Any] = (),
        tools: Sequence[Any] = (),
        tool_parser: str = "",
    ):
        self.row = row
        self.notes: list[str] = []
        self.show_tools(tools or (row.tools if prompt is None else ()), tool_parser)
        self.logprobs = False
        self.turns = self.forks = 0
        self.answer = ""
        self.rewards: list[tuple[int, float]] = []
        self.parts: dict[str, float] = {}
        self.sequences: list[list[Segment]] = []
        self._length = 0
        self._chat: Chat | None = None
        self._calls: dict[int, tuple[Sequence[ToolCall], str]] = {}  # of each turn that has some, and the text beside
        if prompt is None and self.tools == row.tools:
            self._begin(Segment(row.prompt_ids, images=row.images))
        else:
            content = row.messages if prompt is None else prompt
            self._begin(self._encode_prompt(content, images, of_row=row.images))

    def __len__(self) -> int:
        """Return the number of tokens of the last sequence."""
        return self._length

    @property
    def token_ids(self) -> list[int]:
        """Ids ``[T]`` of the last sequence."""
        return [int(token) for segment in self.sequences[-1] for token in segment.token_ids]

    def show_tools(self, tools: Sequence[Any], tool_parser: str = "") -> None:
        """Set the tools of prompts that are rendered from now on, and the parser of samples from now on.

        Args:
            tools, tool_parser: as the constructor takes them.

        Raises:
            ValueError: vLLM has no parser of that name, or a parser does not take the schema of a tool.
        """
        described = tuple(map(_describe_tool, tools))
        if tool_parser:
            from engines.vllm.tools import check_tool_parser, check_tools

            check_tool_parser(tool_parser)
            check_tools(described)
        self.tools, self.tool_parser = described, tool_parser
        if described and self.row.tools and described != self.row.tools:
            names = (", ".join(map(_name_tool, tools)) for tools in (described, self.row.tools))
            note = "environment: it shows the tools {} in place of the row's, {}".format(*names)
            if note not in self.notes:
                self.notes.append(note)

    def observe(self, content: Content, images: Sequence[Any] = ()) -> None:
        """Append an observation of the environment: context for the next sample, which is never trained.

        Args:
            content: ids, text or chat messages. Text is encoded as a continuation of the last id, without special
                tokens that the tokenizer would add. Of messages, only the text that the chat template adds is appended;
                where the template rewrites earlier text, the messages begin a new sequence, as ``fork`` does.
            images: paths, bytes or Pillow images, one for each ``<image>`` of the text or image token of the ids. Those
                of messages may stand in their parts instead, as ``{"type": "image", "image": ...}``.

        Raises:
            ValueError: the content cannot be encoded, or the number of images does not match its places for images.
        """
        codec = get_codec()
        messages, images = split_images(list_messages(content), images)
        if not messages:
            segment = codec.encode((content,), images, self._last)
            if self._chat:
                self._chat.note(content if isinstance(content, str) else codec.decode(segment.token_ids))
            return self._append(segment)
        addition = self._open_chat().add(messages)
        if not addition.is_fork:
            return self._append(codec.encode(addition.parts, images, self._last))
        before = [image for segment in self.sequences[-1] for image in segment.images]
        self.forks += 1
        self._begin(codec.encode(addition.parts, [*before, *images]))

    def fork(
        self,
        content: Content,
        images: Sequence[Any] = (),
        *,
        sampled: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Begin a new sequence of this episode from a rewritten context, such as a summary of the one before.

        Earlier samples stay trained, in the sequence where they were sampled. Before the first sample the context takes
        the place of the prompt.

        Args:
            content, images: the whole new context, in the forms that ``observe`` takes.
            sampled: number of a message (from 0) -> the ids whose text it is, which are kept and not encoded again.
        """
        segment = self._encode_prompt(content, images, sampled)
        if self.turns:
            self.forks += 1
        else:
            self.sequences.clear()
        self._begin(segment)

    def reward(self, value: float) -> None:
        """Add a reward to the last sampled token. The reward of the episode is the sum of all calls.

        Calls without a sample in between add up at the same token. A reward from before the first sample counts at the
        first sampled token.

        Raises:
            RewardError: the value is not a finite number, or the absolute rewards sum to more than ``LARGEST_REWARD``.
        """
        number = read_number(value)
        whole = abs(number) + sum(abs(given) for _, given in self.rewards)
        if not whole <= LARGEST_REWARD:
            raise RewardError(
                "too_large" if isfinite(number) else "not_a_number",
                f"Episode: got reward {value!r:.80}, expected a number that keeps the sum of the episode's absolute "
                f"rewards at or below {LARGEST_REWARD:g}",
            )
        self.rewards.append((self.turns - 1, number))

    def add_sample(self, token_ids: np.ndarray, calls: Sequence[ToolCall] = (), content: str = "") -> None:
        """Append the ids ``[T]`` of this turn's sample. ``Policy.sample`` calls it; an environment does not.

        Args:
            calls: the tool calls in it. content: the text beside them.
        """
        self._append(Segment(token_ids, self.turns))
        if calls:
            self._calls[self.turns] = calls, content
        self.turns += 1
        if self._chat:
            self._chat.note(tuple(token_ids.tolist()), calls, content)

    def _encode_prompt(
        self,
        content: Content,
        images: Sequence[Any],
        sampled: Mapping[int, Sequence[int]] = MappingProxyType({}),
        of_row: Sequence[Any] = (),
    ) -> Segment:
        """Encode the whole context that a sequence begins with. Its images are those ``of_row`` if it brings none."""
        codec = get_codec()
        messages, images = split_images(list_messages(content), images)
        images = images or of_row
        if self.tools and not messages:
            raise ValueError(
                "Episode: got tools and a prompt that is not a chat, but only a chat template shows tools to the "
                "model; give the prompt as chat messages, or leave tools out"
            )
        self._chat = self._make_chat(messages, sampled) if messages else None
        segment = codec.encode(self._chat.cut() if self._chat else (content,), images, is_plain=not messages)
        if not len(segment.token_ids):
            raise ValueError(
                "Episode: the prompt is empty, expected at least one token, from which the first sample is predicted"
            )
        return segment

    def _open_chat(self) -> "Chat":
        """Return the chat so far; that of the row's own messages is opened where the first others follow."""
        if not self._chat:
            if not self.row.messages or self.forks:
                raise ValueError(
                    "observe: got chat messages after a prompt that is not a chat; observe text, or begin the episode "
                    "with chat messages"
                )
            self._chat = self._make_chat(self.row.messages)
            for segment in self.sequences[-1][1:]:
                ids = tuple(map(int, segment.token_ids))
                if segment.turn == CONTEXT:
                    self._chat.note(get_codec().decode(ids))
                else:
                    calls, content = self._calls.get(segment.turn, ((), ""))
                    self._chat.note(ids, calls, content)
        return self._chat

    def _make_chat(
        self, messages: Sequence[Mapping], sampled: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> "Chat":
        from rlworker.environments.chat import Chat

        codec = get_codec()
        return Chat(codec.tokenizer, messages, self.tools, codec.stop_token_ids, sampled)

    @property
    def _last(self) -> int | None:
        """The last id of the sequence that is being written."""
        return next(
            (int(segment.token_ids[-1]) for segment in reversed(self.sequences[-1]) if len(segment.token_ids)), None
        )

    def _begin(self, segment: Segment) -> None:
        self.sequences.append([segment])
        self._length = len(segment.token_ids)

    def _append(self, segment: Segment) -> None:
        self.sequences[-1].append(segment)
        self._length += len(segment.token_ids)


def _describe_tool(tool: Mapping[str, Any] | Callable) -> Mapping[str, Any]:
    if isinstance(tool, Mapping):
        return tool
    from transformers.utils.chat_template_utils import get_json_schema

    return get_json_schema(tool)


def read_parts(parts: Any) -> tuple[tuple[str, float], ...]:
    """Read ``Episode.parts`` as pairs of a name and a finite number.

    Raises:
        RewardError: there is no dict, or a part is no finite number; the message names it.
    """
    if not isinstance(parts, Mapping):
        raise RewardError("not_a_number", f"Episode.parts is {parts!r:.80}, expected a dict of numbers")
    numbers = {str(name): read_number(value) for name, value in parts.items()}
    for (name, number), value in zip(numbers.items(), parts.values(), strict=True):
        if not isfinite(number):
            raise RewardError("not_a_number", f"Episode.parts has {name!r}: {value!r:.80}, expected a finite number")
    return tuple(numbers.items())


def _name_tool(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", "without a name"))


def read_number(value: Any) -> float:
    """Convert a reward to float; text and everything that ``float`` does not take become NaN."""
    try:
        return float("nan" if isinstance(value, (str, bytes, bytearray)) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return float("nan")
