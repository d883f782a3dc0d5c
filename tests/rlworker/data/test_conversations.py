"""Conversations that supervised training learns from: their ids are the template's, their marks transformers' own."""

import json
from copy import copy
from dataclasses import replace

import pytest
from support.environments.rows import ASK, CALLS, CHAT, SAY, TOOL, learn, make_generation_tokenizer
from support.environments.tokenizers import KINDS, TEMPLATES, make_tokenizer

from rlworker.config.sections import DataConfig
from rlworker.data.examples import to_batch


@pytest.mark.parametrize("kind", KINDS)
def test_its_ids_are_those_of_the_whole_conversation_and_every_answer_is_learned_to_its_end(
    kind, tmp_path, make_hf_model
):
    tokenizer = make_tokenizer(kind)
    ((example,), skipped) = learn(tokenizer, tmp_path, make_hf_model, {"messages": CHAT})
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert list(example.ids) == tokenizer(whole, add_special_tokens=False)["input_ids"] and skipped == 0
    end = {"phi3": "<|end|>", "qwen": "<|im_end|>"}.get(kind, "</s>")
    said = [tokenizer.decode(example.ids[first:last]) for first, last in example.turns]
    assert [text.replace(" ", "") for text in said] == [
        f"{m['content']}{end}".replace(" ", "") for m in CHAT if m["role"] == "assistant"
    ]


@pytest.mark.parametrize(("messages", "tools"), [(CHAT, []), (CALLS, [TOOL]), ([*CHAT, *CALLS[1:]], [TOOL])])
def test_what_is_learned_is_what_transformers_marks_as_the_assistants(tmp_path, make_hf_model, messages, tools):
    """Calls of tools among it; the tools, what they return and all else is seen alone."""
    tokenizer = make_generation_tokenizer()
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, {"messages": messages, "tools": tools})
    want = tokenizer.apply_chat_template(
        messages, tools=tools or None, return_dict=True, return_assistant_tokens_mask=True
    )
    assert list(example.ids) == want["input_ids"]
    assert example.mark_learned().tolist() == [bool(mark) for mark in want["assistant_masks"]]
    batch = to_batch([example, example])
    assert batch.mask.tolist() == [bool(mark) for mark in want["assistant_masks"][1:]] * 2
    assert sum(want["assistant_masks"]) > 4


@pytest.mark.parametrize("is_nested", [True, False])
def test_arguments_in_openais_form_are_learned_as_objects(tmp_path, make_hf_model, is_nested):
    """There they are JSON, which a template would write as a string."""

    def write(arguments):
        call = {"name": "look", "arguments": arguments}
        return [ASK, {"role": "assistant", "content": None, "tool_calls": [{"function": call} if is_nested else call]}]

    tokenizer = make_generation_tokenizer()
    learned = [
        learn(tokenizer, tmp_path, make_hf_model, {"messages": write(arguments)})
        for arguments in ({"place": ["here"]}, '{"place": ["here"]}')
    ]
    assert learned[0] == learned[1]
    with pytest.raises(ValueError, match=r"line 1: .*the arguments of a tool call are no JSON: '{place}'"):
        learn(tokenizer, tmp_path, make_hf_model, {"messages": write("{place}")})


def test_a_call_that_the_template_leaves_out_is_named(tmp_path, make_hf_model):
    """Else an empty answer would be learned in its place."""
    tokenizer = copy(make_tokenizer("qwen"))
    messages = [message | {"content": message.get("content") or ""} for message in CALLS]
    with pytest.raises(ValueError, match=r"line 1: .*the chat template does not read tools"):
        learn(tokenizer, tmp_path, make_hf_model, {"messages": messages, "tools": [TOOL]})
    tokenizer.chat_template = "{{ tools and '' }}" + TEMPLATES["qwen"]
    with pytest.raises(ValueError, match=r"line 1: .*it leaves out the call of 'add' of"):
        learn(tokenizer, tmp_path, make_hf_model, {"messages": messages, "tools": [TOOL]})


def test_a_template_that_drops_thinking_makes_a_sequence_of_each_turn(tmp_path, make_hf_model):
    """The model learns behind what it will see: a turn has its own thinking, those before it theirs no longer."""
    tokenizer = copy(make_tokenizer("qwen"))
    thinking = "(m.content if loop.last else m.content.split('T?')[-1]) +"
    tokenizer.chat_template = TEMPLATES["qwen"].replace("m.content +", thinking)
    says = [SAY | {"content": f"Hi T?{number}"} for number in range(3)]
    messages = [message for say in says for message in (ASK, say)]
    examples, _ = learn(tokenizer, tmp_path, make_hf_model, {"messages": messages})
    for number, example in enumerate(examples):
        before = messages[: 2 * number + 1]
        prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        ((first, last),) = example.turns
        assert tokenizer.decode(example.ids[:first]) == prompt
        assert tokenizer.decode(example.ids[first:last]) == f"Hi T?{number}<|im_end|>"
    assert len(examples) == 3


def test_a_turn_that_the_template_does_not_end_is_ended_by_the_tokenizer(tmp_path, make_hf_model):
    tokenizer = copy(make_tokenizer("qwen"))
    tokenizer.chat_template = TEMPLATES["qwen"].replace("'<|im_end|>\\n'", "'\\n'")
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, {"messages": [ASK, SAY]})
    ((first, last),) = example.turns
    assert tokenizer.decode(example.ids[first:last]) == "The answer is 42.<|endoftext|>"


def test_messages_for_a_prompt_without_an_answer_are_a_conversation_too(tmp_path, make_hf_model):
    tokenizer = make_tokenizer("qwen")
    named = learn(tokenizer, tmp_path, make_hf_model, {"chat": CHAT, "id": 4}, data=DataConfig(prompt_field="chat"))
    assert named == learn(tokenizer, tmp_path, make_hf_model, {"messages": CHAT})


def test_long_conversations_are_an_error_or_left_out(tmp_path, make_hf_model):
    tokenizer, rows = make_tokenizer("qwen"), [{"messages": CHAT}, {"messages": CHAT[:2]}]
    short = dict(max_answer_tokens=8)
    data = DataConfig(max_prompt_tokens=32)
    with pytest.raises(ValueError, match=r"line 1: the conversation has \d+ tokens, expected at most .* = 40; raise"):
        learn(tokenizer, tmp_path, make_hf_model, *rows, data=data, **short)
    skip = replace(data, skip_long_prompts=True)
    examples, skipped = learn(tokenizer, tmp_path, make_hf_model, *rows, data=skip, **short)
    assert (len(examples), skipped) == (1, 1)
    with pytest.raises(ValueError, match="all conversations are longer than 40 tokens"):
        learn(tokenizer, tmp_path, make_hf_model, rows[0], data=skip, **short)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASK]}, 'line 2: field "messages" has no message of the assistant'),
        ({"prompt": "x", "answer": "y"}, 'line 2: field "prompt" must be a list of messages, as in the first row'),
        ({"id": 4}, 'line 2: field "messages" must be a list of messages, as in the first row, got None'),
        ({"messages": json.dumps(CHAT)}, "must be a list of messages, as in the first row"),
        ({"messages": [*CHAT, {"role": "tool", "content": 42}]}, r"message 6 \(from 0\), of role 'tool'"),
        ({"messages": CHAT, "tools": "look_up"}, 'field "tools" must be a list of JSON schemas, or the text of its'),
        ({"messages": [ASK, SAY | {"content": "\ud83d"}]}, "is no valid Unicode text"),
        ({"messages": [SAY, ASK, SAY]}, "line 2: the conversation begins with the assistant, .* put a message there"),
        ({"messages": CHAT, "images": ["a.png"]}, "has images or videos, which this model cannot see"),
    ],
)
def test_a_broken_conversation_is_named(tmp_path, make_hf_model, row, message):
    with pytest.raises(ValueError, match=message):
        learn(make_tokenizer("qwen"), tmp_path, make_hf_model, {"messages": CHAT}, row)


def test_what_the_template_refuses_is_named(tmp_path, make_hf_model):
    tokenizer = copy(make_tokenizer("qwen"))
    for template, messages, message in (
        ("{{ raise_exception('no ' + messages[0].role) }}", CHAT, "line 1: the chat template refuses .*: no user"),
        (
            TEMPLATES["qwen"].replace("m.content +", "(m.content if loop.last else '') +"),
            CHAT[:4],
            "with the answer behind them it writes the messages before in another way",
        ),
        (None, CHAT, "line 1 has messages, but the tokenizer has no chat template"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=message):
            learn(tokenizer, tmp_path, make_hf_model, {"messages": messages})
