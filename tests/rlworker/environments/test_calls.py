"""Messages that answer a model's calls of tools: each is called as Python calls it, and what goes wrong is told."""

import math
import operator
from dataclasses import replace
from functools import partial

import support.environments.tool_functions as tools
from support.environments.runners import LIMITS, LocalPool, encode, make_rows, run_episodes, tell

from rlworker.environments import Episode, EpisodeLimit
from rlworker.environments.record import ToolCall
from rlworker.environments.tools.calls import answer_calls
from rlworker.environments.tools.results import ToolContent, tell_model

TOOLS = {
    "lay_out": tools.lay_out,
    "places": tools.take_places,
    "names": tools.take_names,
    "dispatch": tools.dispatch,
    "shout": tools.shout,
    "wrapped": tools.wrap_async,
    "stumble": tools.stumble,
    "unspeakable": tools.raise_unspeakable,
    "tick": tools.tick,
    "partial": partial(tools.lay_out, 1, c=4),
    "async_partial": partial(tools.shout, text="bound"),
    "object": tools.Scale(3),
    "async_object": tools.SlowScale(3),
    "method": tools.Scale(3).take_from,
    "class_method": tools.Scale.take_units,
    "class": tools.Scale,
    "sqrt": math.sqrt,
    "max": max,
    "getter": operator.itemgetter(1),
    "wrapper": tools.search,
    "lambda": lambda x, y=[7]: [x, *y],
}


def open_file(name):
    return open(f"/nowhere/at all/{name}" if "/" not in name else name).read()


def answer(*calls: ToolCall, error: str = "") -> list[str]:
    """Answer calls within an environment, in which tools run in processes of their own."""
    messages = []

    async def environment(policy, row):
        episode = Episode(row)
        sample = await policy.sample(episode)
        messages.extend(await answer_calls(policy, replace(sample, calls=calls, call_error=error), TOOLS))
        return episode

    (record,) = run_episodes(LocalPool(environment, limits=replace(LIMITS, tool_limit_s=30.0)), make_rows("1+1="))
    assert record.failure is None, "whatever a tool does, the episode goes on"
    assert all(message["role"] == "tool" for message in messages)
    return [message["content"] for message in messages]


def test_tools_are_called_as_python_calls_them():
    """With an argument left out before one that is given, by name alone, and with further ones; each kind of tool."""
    calls = [
        ("lay_out", {"a": 1, "c": 5}, (1, 2, (), 5, {})),
        ("lay_out", {"c": 5, "a": 1, "d": None, "limit_s": 9}, (1, 2, (), 5, {"d": None, "limit_s": 9})),
        ("places", {"c": 9, "a": 1}, (1, 2, 9)),
        ("names", {"limit_s": 1, "keywords": 2}, (1, 5, 2)),
        ("dispatch", {"tool": "web", "query": "x"}, "web: x"),
        ("partial", {"b": 9, "e": 0}, (1, 9, (), 4, {"e": 0})),
        ("partial", {"c": 9}, (1, 2, (), 9, {})),
        ("object", {"x": 2}, 6),
        ("async_object", {"x": 2}, 6),
        ("method", {"x": 2, "start": 10}, 4),
        ("class_method", {"x": 2}, 20),
        ("sqrt", {"x": 16}, 4.0),
        ("wrapper", {"query": "ok"}, "a session: ok"),
        ("lambda", {"x": 2}, [2, 7]),
        ("shout", {"text": "ok"}, "OK"),
        ("wrapped", {"text": "ok"}, "OK"),
        ("async_partial", {}, "BOUND"),
    ]
    contents = answer(*(ToolCall(name, arguments) for name, arguments, _ in calls))
    assert contents == [str(result) for *_, result in calls]


def test_no_call_has_no_answer():
    assert answer() == []


def test_what_goes_wrong_is_told():
    calls = [
        ("subtract", {}, "error: there is no tool 'subtract', there are lay_out, places, "),
        ("lay_out", {"b": 1}, "error: missing a required argument: 'a'"),
        ("places", {"a": 1, "d": 1}, "error: got an unexpected keyword argument 'd'"),
        ("max", {"iterable": [1, 2]}, "error: max: TypeError: max expected at least 1 argument, got 0"),
        ("getter", {"obj": [1, 2]}, "error: itemgetter"),
        ("stumble", {"how": "key"}, "error: stumble: KeyError"),
        ("stumble", {"how": "half"}, "ValueError: level \\ud83d"),
        ("stumble", {"how": "exit"}, "SystemExit: 3"),
        ("unspeakable", {}, "Unspeakable: (its message cannot be made)"),
        ("tick", {}, "a generator cannot be sent"),
        ("async_object", {"x": None}, "error: SlowScale: TypeError"),
        ("class", {}, "error: missing a required argument: 'factor'"),
    ]
    contents = answer(*(ToolCall(name, arguments) for name, arguments, _ in calls))
    for content, (*_, said) in zip(contents, calls, strict=True):
        assert content.startswith("error: ") and said in content and " 0x" not in content, said
        assert ".py" not in content and "/" not in content, "where the code stands is not the model's"


def test_a_model_reads_no_path_of_the_machine(caplog):
    """Neither of the tool's code nor of what it opened, but for one that the model named; the log has them."""

    async def open_slowly(name):
        return open(f"/nowhere/at all/{name}" if "/" not in name else name).read()

    TOOLS["open"], TOOLS["open_slowly"] = open_file, open_slowly
    with caplog.at_level("INFO"):
        contents = answer(*(ToolCall(tool, {"name": "a.txt"}) for tool in ("open", "open_slowly")))
    for content in contents:
        assert "FileNotFoundError: [Errno 2] No such file or directory" in content and "a.txt" in content
        assert "nowhere" not in content and ".py" not in content
    assert caplog.text.count("/nowhere/at") == 2 and "test_calls.py:" in caplog.text
    (content,) = answer(ToolCall("open", {"name": "/nowhere/b.txt"}))
    assert "'/nowhere/b.txt'" in content


def test_an_address_of_the_web_stays_in_an_error():
    message = (
        "fetch (/home/me/tools.py:12): HTTPError: 404 for https://example.org/a/b, see /var/log/x.log, at /a/b.py:3"
    )
    assert tell_model(message, {}) == "error: fetch: HTTPError: 404 for https://example.org/a/b, see x.log"


def test_a_result_with_images_is_parts_of_the_message():
    parts = {"type": "text", "text": "see"}, {"type": "image", "image": b"pixels"}
    TOOLS["show"] = lambda: ToolContent(parts)
    assert answer(ToolCall("show", {})) == [list(parts)]


def test_a_call_that_cannot_be_read_is_told():
    assert answer(error="JSONDecodeError: it ends") == ["error: the call cannot be read: JSONDecodeError: it ends"]


def test_a_limit_that_an_async_tool_comes_to_is_the_episodes():
    async def think_on(policy):
        raise EpisodeLimit("turn 5 of at most 4")

    async def environment(policy, row):
        episode = Episode(row)
        sample = await policy.sample(episode)
        call = ToolCall("think_on", {})
        await answer_calls(policy, replace(sample, calls=(call,)), {"think_on": partial(think_on, policy)})
        return episode

    (record,) = run_episodes(LocalPool(environment), make_rows("1+1="))
    assert record.failure and record.failure[0] == "limit"


def test_half_a_surrogate_in_a_tools_text_is_replaced():
    """Alone it becomes U+FFFD, which this tokenizer does not know; two halves are the character that they make."""

    async def environment(policy, row):
        episode = Episode(row)
        sample = await policy.sample(episode)
        call = ToolCall("lambda", {"x": "7\ud83d"})
        (message,) = await answer_calls(policy, replace(sample, calls=(call,)), {"lambda": lambda x: x + "8"})
        episode.observe(message["content"])
        await policy.sample(episode)
        return episode

    (record,) = run_episodes(LocalPool(environment), make_rows("1+1="))
    assert record.failure is None
    observed = record.sequences[0][2].token_ids
    assert list(observed) == encode("7\ufffd8") and tell(record)[0][2][1].startswith("7")
