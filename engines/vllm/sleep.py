"""Sleep: a rollout engine gives its devices' memory back to the trainers that share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engines.interfaces import Tag

if TYPE_CHECKING:
    from vllm import LLM

TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


class Sleep:
    """The state of an engine's memory: the parts that are awake. The order is kept where its platform cannot sleep,
    too.

    Args:
        frees: vLLM can give memory back here, and was started so that it does.

    Attributes:
        has_weights: no sleep has dropped them since they were loaded or sent.
    """

    def __init__(self, llm: LLM, frees: bool):
        self._llm, self._frees = llm, frees
        self._awake: set[Tag] = set(TAGS)
        self.has_weights = True

    def sleep(self, level: int) -> None:
        """Give all memory back; weights are kept on the host (level 1) or dropped (level 2)."""
        if not self._awake:
            return
        self.wake(TAGS)  # vLLM takes one that is half awake for one that sleeps, and would do nothing
        if self._frees:
            self._llm.sleep(level)
        self._awake.clear()
        self.has_weights &= level == 1

    def wake(self, tags: Sequence[Tag]) -> None:
        """Take memory back, where it sleeps. Dropped weights hold garbage until they are sent."""
        asleep: list[Tag] = [tag for tag in tags if tag not in self._awake]
        if asleep and self._frees:
            self._llm.wake_up([*asleep])
        self._awake.update(asleep)

    def require(self, who: str, *tags: Tag) -> None:
        """Raise RuntimeError where some of this memory sleeps."""
        if asleep := [tag for tag in tags if tag not in self._awake]:
            raise RuntimeError(
                f"rollout: {who} was called while {' and '.join(asleep)} sleep, expected them awake; it is the "
                "trainers' turn on the devices: call wake first"
            )

    def require_weights(self, who: str) -> None:
        """Raise RuntimeError where something sleeps, or the weights were dropped and none were sent since."""
        self.require(who, *TAGS)
        if not self.has_weights:
            raise RuntimeError(
                f"rollout: {who} was called, and a sleep of level 2 dropped the weights; send them first"
            )
