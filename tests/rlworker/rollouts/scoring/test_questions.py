"""Questions of episodes to served models: asked together, equal ones once, and again where an engine or a process was
lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.environments.runners import LocalPool, make_rows, run_episodes

from engines.config import ServedModelConfig
from rlworker.environments import Episode, NoVerdict
from rlworker.environments.parts import combine_parts
from rlworker.environments.record import Verdict

pytestmark = pytest.mark.usefixtures("cluster")


class Model:
    """The engines of a served model: a verdict is the length of the text by 10, or an error for an empty one.

    ``asked`` has what each call of each engine was; ``lose`` are calls, from 0, that find their engine lost.
    """

    def __init__(self, engines: int = 1, lose: tuple[int, ...] = ()):
        self.asked, self.lose, self.replaced = [], lose, []
        self.serving = self.workers = [Worker(self, index) for index in range(engines)]

    def replace_or_raise(self, lost) -> None:
        self.replaced += lost
        for index in lost:
            self.serving[index] = Worker(self, index)


class Worker:
    def __init__(self, model: Model, index: int):
        self.model, self.index, self.answer = model, index, self

    def remote(self, contents: list, seed: int):
        import ray

        self.model.asked.append((self.index, [*contents], seed))
        if len(self.model.asked) - 1 in self.model.lose:
            return ask_dead(len(self.model.workers))
        return ray.put([judge(content) for content in contents])


@cache
def ask_dead(number: int):
    """Ask a worker that has ended: Ray's reference, which raises what a lost engine's does."""
    import ray

    class Dead:
        def answer(self) -> None:
            pass

    worker = ray.remote(Dead).options(num_cpus=0).remote()
    ray.kill(worker)
    return worker.answer.remote()


def judge(content) -> Verdict:
    text = content["text"] if isinstance(content, dict) else content[-1]["content"]
    return Verdict(len(text) / 10, (f"of {text}",)) if text else Verdict(error="nothing to judge")


async def ask_twice(policy, row):
    """Ask two judges at once about the sample, then one of them about their verdict; sample again in between."""
    episode = Episode(row)
    sample = await policy.sample(episode)
    first = await policy.judge("one", "two", text=sample.text)
    episode.observe(f"{first.value:.1f};")
    sample = await policy.sample(episode)
    second = await policy.judge("one", text=sample.text * 2)
    episode.reward(first.value + second.value)
    episode.parts |= {"first": first.value, "second": second.value}
    return episode


def tell(trajectories) -> list:
    return [(one.rewards, one.parts, one.verdicts, one.failure) for one in trajectories]


def test_all_questions_of_a_round_are_asked_in_one_call_and_equal_ones_once():
    one, two = Model(), Model(2)
    rows = make_rows("a", "bc", "def", "ghij", "klmno", "a")
    done = run_episodes(LocalPool(ask_twice), rows, 2, served={"one": one, "two": two})
    assert not any(trajectory.failure for trajectory in done)
    first, second = (contents for _, contents, _ in one.asked)
    assert len(first) == 5 == len({content["text"] for content in first}), "six rows, of which two are equal"
    assert len(second) <= 5
    assert [index for index, _, _ in two.asked] == [0, 1], "each engine has its part"
    assert len({seed for _, _, seed in one.asked}) == 2
    for trajectory in done:
        assert [name for name, _ in trajectory.verdicts] == ["one", "two", "one"]
        assert trajectory.reward == pytest.approx(sum(value for _, value in trajectory.parts))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("lost_round", [None, 1, 2, 3])
def test_a_lost_process_and_a_lost_engine_change_nothing(workers, lost_round):
    rows = make_rows("a", "bc", "def", "ghij")
    plain = {"one": Model(), "two": Model(2)}
    expected = run_episodes(LocalPool(ask_twice), rows, 2, served=plain)
    lose = {lost_round: 0} if lost_round else {}
    served = {"one": Model(lose=(1,)), "two": Model(2, lose=(0,))}
    pool, noted = LocalPool(ask_twice, workers, lose=lose), []
    done = run_episodes(pool, rows, 2, served=served, note_lost=noted.append)
    assert tell(done) == tell(expected)
    assert served["one"].replaced == [0] == served["two"].replaced
    answered = [contents for number, (_, contents, _) in enumerate(served["one"].asked) if number != 1]
    assert answered == [contents for _, contents, _ in plain["one"].asked], "nothing that is known is asked again"


async def ask_badly(policy, row):
    episode = Episode(row)
    await policy.sample(episode)
    if row.prompt == "caught":
        try:
            await policy.judge("one", text="")
        except NoVerdict:
            episode.reward(0.25)
        return episode
    await (policy.score("none", "x") if row.prompt == "name" else policy.judge("one", text=""))
    return episode


def test_a_question_without_a_verdict_fails_its_episode_unless_it_is_caught():
    caught, name, empty = run_episodes(
        LocalPool(ask_badly), make_rows("caught", "name", "empty"), default=-1.0, served={"one": Model()}
    )
    assert caught.failure is None and caught.reward == 0.25
    assert [one.failure[0] for one in (name, empty)] == ["no_verdict"] * 2 and name.reward == empty.reward == -1.0
    assert "no model is called 'none', the run has one; set --models.none.model" in name.failure[1]
    assert "nothing to judge" in empty.failure[1]


async def ask_of_values(policy, row):
    """Ask about an array, or by keys that JSON cannot sort."""
    episode, values = Episode(row), np.zeros(5000)
    values[2500] = row.prompt == "b"
    await policy.sample(episode)
    asked = {"counts": {1: "x", "all": 3}} if row.prompt == "keys" else {"values": values}
    episode.reward((await policy.judge("one", text="long", **asked)).value)
    return episode


def test_questions_are_equal_by_their_whole_values():
    model = Model()
    *equal, keys = run_episodes(LocalPool(ask_of_values), make_rows("a", "b", "a", "keys"), served={"one": model})
    assert [one.reward for one in equal] == [0.4] * 3 and len(model.asked[0][1]) == 2
    assert keys.failure[0] == "no_verdict" and "a question to 'one' is compared as JSON" in keys.failure[1]


async def give_up(policy, row):
    """Cancel a question, and sample on."""
    episode = Episode(row)
    await policy.sample(episode)
    asked = asyncio.ensure_future(policy.judge("one", text="long"))
    await asyncio.sleep(0)
    asked.cancel()
    await policy.sample(episode)
    episode.reward(1.0)
    return episode


def test_a_question_that_was_given_up_holds_nothing_up():
    (done,) = run_episodes(LocalPool(give_up), make_rows("a"), served={"one": Model()})
    assert done.reward == 1.0 and done.turns == 2


def count_letters(text, row):
    return len(text)


def test_parts_are_weighed_and_told():
    models = {
        "one": ServedModelConfig("FOLDER", template="FILE", weight=2.0),
        "two": ServedModelConfig("FOLDER", "classifier", weight=-1.0),
    }
    environment = combine_parts({"letters": count_letters}, models, {"letters": 0.5})
    done = run_episodes(LocalPool(environment), make_rows("a", "bc"), 2, served={"one": Model(), "two": Model()})
    for one in done:
        parts = dict(one.parts)
        assert parts["one"] == parts["two"] == parts["letters"] / 10 > 0
        assert one.reward == pytest.approx(0.5 * parts["letters"] + 2 * parts["one"] - parts["two"])

    from rlworker.rollouts.metrics import describe_trajectory, summarise_groups

    metrics = summarise_groups([done[:2], done[2:]])
    assert metrics["reward_one_mean"] == pytest.approx(sum(dict(one.parts)["one"] for one in done) / 4)
    assert metrics["verdicts_one"] == metrics["verdicts_two"] == 1 and metrics["unreadable_one"] == 0
    from support.environments.runners import make_codec

    line = describe_trajectory(done[0], make_codec())
    assert line["parts"] == dict(done[0].parts) and line["verdicts"][0]["text"].startswith("of ")


def test_served_models_are_asked_about_a_begun_answer_as_a_whole():
    """The prompt ends with the assistant's words, which the sample goes on with."""
    models = {
        name: ServedModelConfig("FOLDER", kind, template="") for name, kind in (("j", "judge"), ("c", "classifier"))
    }
    (row,) = make_rows("a")
    row = replace(row, messages=({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So: "}))
    served = {"j": Model(), "c": Model()}
    (done,) = run_episodes(LocalPool(combine_parts({}, models)), [row], served=served)
    asked = {name: model.asked[0][1][0] for name, model in served.items()}  # content of the first question
    text = asked["j"]["text"]
    assert text.startswith("So: ~") and asked["j"]["question"] == "Why?" and not done.failure
    assert asked["c"] == [row.messages[0], {"role": "assistant", "content": text}]


def test_parts_that_cannot_be_are_refused():
    models = {"letters": ServedModelConfig("FOLDER", template="FILE")}
    with pytest.raises(ValueError, match=r"\['letters'\] name functions and models"):
        combine_parts({"letters": count_letters}, models)
    with pytest.raises(ValueError, match=r"weights has \['other'\]"):
        combine_parts({"letters": count_letters}, {}, {"other": 1.0})
