"""Sleep: a rollout engine frees its devices' memory for the trainers that share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engines.interfaces import Tag

if TYPE_CHECKING:
    from vllm import LLM

TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


class Sleep:
    """Tracks the parts of an engine's memory that are awake, also on platforms that cannot sleep.

    Args:
        frees: whether vLLM can free memory here, and was started so.

    Attributes:
        has_weights: whether no sleep has dropped the weights since they were loaded or sent.
    """

    def __init__(self, llm: LLM, frees: bool):
        self._llm, self._frees = llm, frees
        self._awake: set[Tag] = set(TAGS)
        self.has_weights = True

    def sleep(self, level: int) -> None:
        """Free all memory; weights are kept on the host (level 1) or dropped (level 2)."""
        if not self._awake:
            return
        self.wake(TAGS)  # vLLM takes one that is half awake for one that sleeps, and would do nothing
        if self._frees:
            self._llm.sleep(level)
        self._awake.clear()
        self.has_weights &= level == 1

    def wake(self, tags: Sequence[Tag]) -> None:
        """Allocate the sleeping parts again. Weights that sleep has dropped are undefined until a sync sends them."""
        asleep: list[Tag] = [tag for tag in tags if tag not in self._awake]
        if asleep and self._frees:
            self._llm.wake_up([*asleep])
        self._awake.update(asleep)

    def require(self, who: str, *tags: Tag) -> None:
        """Raise RuntimeError if a part in ``tags`` sleeps; ``who`` names the caller in the message."""
        if asleep := [tag for tag in tags if tag not in self._awake]:
            raise RuntimeError(
                f"rollout: {who} was called while {' and '.join(asleep)} sleep, expected them awake; it is the "
                "trainers' turn on the devices: call wake first"
            )

    def require_weights(self, who: str) -> None:
        """Raise RuntimeError if any part sleeps, or the weights were dropped and not sent since."""
        self.require(who, *TAGS)
        if not self.has_weights:
            raise RuntimeError(
                f"rollout: {who} was called, and a sleep of level 2 dropped the weights; send them first"
            )
