"""The texts that rollout engines and actor are compared on, and the larger of the differences."""

import math
from types import SimpleNamespace
from typing import Any, cast

from rlworker.data.rows import Row


def cut(*args) -> list[tuple[int, ...]]:
    from rlworker.trainers.canary import cut_texts

    return [row.prompt_ids for row in cut_texts(*args)]


def test_texts_begin_with_prompts_and_are_as_long_as_asked():
    prompts = [(1, 2, 3), (), (4,), (5, 6, 7, 8, 9)]
    assert cut(prompts, 8, 2, 4) == [(1, 2, 3), (4, 5, 6, 7), (1, 2, 3), (4, 5, 6, 7)], "8 ids or more beside the first"
    assert cut(prompts, 6, 7, 7) == [(1, 2, 3, 4, 5, 6, 7)], "prompts follow one another"
    assert cut([(1,)], 3, 2, 2) == [(1, 1)] * 3


def test_without_room_or_text_there_is_none():
    assert cut([(1, 2)], 5, 1, 1) == cut([()], 5, 3, 3) == cut([], 5, 3, 3) == []


def test_what_is_no_number_after_an_image_is_no_agreement(monkeypatch):
    from rlworker.trainers.canary import Canary

    compare = lambda self, rows, scores_prompt: {"logprob_diff_mean": 1e-7 if scores_prompt else math.nan}  # noqa: E731
    monkeypatch.setattr(Canary, "_compare", compare)
    model: Any = SimpleNamespace(banned_tokens=(), vision=None)
    canary = Canary(cast(Any, None), cast(Any, None), model, [Row("", (1, 2, 3), "", {}, cast(Any, ("image",)))], 1, 64)
    assert math.isnan(canary.measure()["logprob_diff_mean"])
