"""Completions ahead of the trainer: groups are scored as they become whole, beside those that are still sampled."""

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

from engines.batch.samples import Completions, Prompt, Request
from rlworker.rewards.pool import RewardPool
from rlworker.rollouts.scoring import score_completions
from rlworker.rollouts.stream.draw import Draw, Finished
from rlworker.rollouts.stream.feed import Feed

_CLOSE_S = 2.0
"""Seconds that rewards which nobody waits for any more may take before the run ends without them."""


class PromptDrawer:
    """Draws completions, and has them scored by a thread of its own: rewards may take as long as they take."""

    def __init__(self, feed: Feed, tokenizer: Any, rewards: RewardPool):
        self._feed, self._tokenizer, self._rewards = feed, tokenizer, rewards
        self._sampled: SimpleQueue = SimpleQueue()
        self._scored: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._score, name="reward", daemon=True)
        self._thread.start()

    def begin(self, draw: Draw) -> None:
        sampling = draw.sampling
        settings = sampling.temperature, sampling.max_tokens, sampling.stop_token_ids, sampling.expected_tokens
        more: dict[str, Any] = dict(
            top_logprobs=sampling.top_logprobs, count=sampling.count, goes_first=draw.goes_first
        )
        prompts = (Prompt(row.prompt_ids, row.images) for row in draw.rows)
        requests = [Request(prompt, *settings, **more) for prompt in prompts]
        self._feed.submit(((draw.number, place), request) for place, request in enumerate(requests))

    def take(self, draw: Draw, key: tuple, completions: Completions) -> None:
        self._sampled.put((draw, key[1], completions))

    def advance(self) -> list[Finished]:
        finished = []
        for found in _drain(self._scored):
            if isinstance(found, BaseException):
                raise found
            draw, places, groups, scores = found
            draw.scores.append(scores)
            finished += [(draw, place, group) for place, group in zip(places, groups, strict=True)]
        return [one for one in finished if not one[0].is_forgotten]

    references: Sequence[Any] = ()

    def forget(self) -> None:
        pass  # what is being scored comes to its end, and is nobody's

    def close(self) -> None:
        self._sampled.put(None)
        self._thread.join(_CLOSE_S)

    def _score(self) -> None:
        """Score what has been sampled, until the end."""
        try:
            while (first := self._sampled.get()) is not None:
                waiting = [first, *_drain(self._sampled)]
                for draw in dict.fromkeys(one[0] for one in waiting if one and not one[0].is_forgotten):
                    self._score_part(draw, [one[1:] for one in waiting if one and one[0] is draw])
                if waiting[-1] is None:
                    return
        except BaseException as error:  # whoever waits for the groups is told
            self._scored.put(error)

    def _score_part(self, draw: Draw, found: Sequence[tuple[int, Completions]]) -> None:
        places, parts = zip(*found, strict=True)
        rows = [draw.rows[place] for place in places]
        groups, scores = score_completions(self._tokenizer, self._rewards, rows, Completions.concatenate(parts))
        self._scored.put((draw, places, groups, scores))


def _drain(queue: SimpleQueue) -> list:
    """Take all that a queue has."""
    found = []
    try:
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found
