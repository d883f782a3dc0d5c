"""A reward of several parts: functions, classifiers and judges, each with a weight."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlworker.data.chat.messages import flatten_content
from rlworker.data.chat.templates import is_begun
from rlworker.data.rows import Row
from rlworker.environments.episode import Episode, read_number
from rlworker.environments.policy import Policy
from rlworker.environments.reward import (
    AnswerFn,
    Environment,
    RewardFn,
    ScoredTurn,
    check_arguments,
    check_reward,
    find_answer,
    is_batch,
    split_score,
)
from rlworker.environments.user_code import is_async, name_function

if TYPE_CHECKING:  # processes of environments load nothing of engines
    from engines.config import ServedModelConfig


class CombinedParts(ScoredTurn):
    """The environment of one turn whose reward is the weighted sum of its parts. ``combine_parts`` makes it.

    Args:
        functions: name -> reward function. models: name of a served model -> its kind.
        weights: name -> weight. answer: as of ``one_turn``.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFn],
        models: Mapping[str, str],
        weights: Mapping[str, float],
        answer: AnswerFn | None,
    ):
        self.functions, self.models, self.weights, self.answer = functions, models, weights, answer
        self.scorers = list(functions.values())
        self.__qualname__ = f"combine_parts({', '.join(weights)})"

    async def __call__(self, policy: Policy, row: Row) -> Episode:
        episode = Episode(row)
        text = (await policy.sample(episode)).text
        details: dict[str, float] = {}  # the parts of a part, which have no weight
        for name, function in self.functions.items():
            value: Any = function(text, row)
            score, of_score = split_score(await value if is_async(function) else value)
            episode.parts[name] = read_number(score)
            details |= {f"{name}_{detail}": number for detail, number in of_score.items()}
        verdicts = await asyncio.gather(*(_ask(policy, name, kind, text, row) for name, kind in self.models.items()))
        episode.parts |= zip(self.models, verdicts, strict=True)
        for name, value in episode.parts.items():
            episode.reward(self.weights[name] * value)
        episode.parts = details | episode.parts
        if self.answer:
            episode.answer = find_answer(self.answer, text, row)
        return episode


async def _ask(policy: Policy, name: str, kind: str, text: str, row: Row) -> float:
    """Ask a judge about a text, or a classifier about the chat that it ends."""
    asked = row.messages or ({"role": "user", "content": row.prompt},)
    if is_begun(asked):  # the text goes on with the assistant's last message
        *asked, begun = asked
        text = (flatten_content(begun["content"]) or "") + text
    if kind == "judge":
        last = asked[-1]["content"]  # without what the policy's chat template writes around it
        question = last if isinstance(last, str) else row.prompt
        verdict = await policy.judge(name, question=question, answer=row.answer, text=text, row=row.source)
    else:
        verdict = await policy.score(name, [*asked, {"role": "assistant", "content": text}])
    return verdict.value


def combine_parts(
    functions: Mapping[str, RewardFn],
    models: "Mapping[str, ServedModelConfig]",
    weights: Mapping[str, float] | None = None,
    answer: AnswerFn | None = None,
) -> Environment:
    """Make an environment of one turn whose reward is a weighted sum of numbers.

    Its parts are reward functions, and the served models of the run, each with its ``weight``. A judge is asked with
    the fields ``question`` (the row's last message or text), ``answer``, ``text`` (the sample) and ``row``; a
    classifier with the chat. The mean of each part is the metric ``reward_NAME_mean``. A part without a number fails
    the episode.

    Args:
        functions: name -> ``reward(text, row)``. models: ``config.models``.
        weights: name of a function -> weight; 1 where there is none.
        answer: ``answer(text, row)``, as of ``one_turn``.

    Raises:
        ValueError: a function cannot be called so, a name is there twice, or a weight is of no function.
    """
    weights = dict(weights or {})
    for function in functions.values():
        check_reward(function)
        if is_batch(function):
            raise ValueError(
                f"combine_parts: {name_function(function)} is a batch reward, and parts are called for each text; "
                "leave batch_reward out"
            )
    if answer:
        check_arguments(answer, "answer(text, row)")
    if clashes := functions.keys() & models.keys():
        raise ValueError(f"combine_parts: {sorted(clashes)} name functions and models; rename the functions")
    if unknown := weights.keys() - functions.keys():
        raise ValueError(
            f"combine_parts: weights has {sorted(unknown)}, expected names of functions; that of a model is "
            "--models.NAME.weight"
        )
    every = {name: weights.get(name, 1.0) for name in functions} | {name: each.weight for name, each in models.items()}
    return CombinedParts(functions, {name: each.kind for name, each in models.items()}, every, answer)
