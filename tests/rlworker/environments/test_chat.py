"""Messages after what was sampled: the template's own remainder, or a fork where it rewrites what stood there."""

import jinja2
import pytest
from support.environments.chat import QWEN2_5, QWEN3, make_chat_tokenizer

from rlworker.environments.chat import Addition, Chat

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASK = {"role": "user", "content": "1+1, ok?"}
RESULT = {"role": "tool", "content": "2"}


class Sequence:
    """Ids of one sequence, written by a chat and by what a model would have sampled."""

    def __init__(self, template: str, tools=(TOOL,)):
        self.tokenizer = make_chat_tokenizer(template)
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.messages, self.tools = [ASK], tools
        self.chat = Chat(self.tokenizer, self.messages, tools, (self.end, self.tokenizer.eos_token_id))
        self.ids = self.encode((self.chat.text,))

    def encode(self, pieces: tuple) -> list[int]:
        return [i for p in pieces for i in (self.tokenizer(p)["input_ids"] if isinstance(p, str) else p)]

    def sample(self, *parts: str, end: str = "<|im_end|>") -> tuple[int, ...]:
        """Append what the model writes; each part is as many tokens as it has letters, unless it is one token."""
        vocabulary = self.tokenizer.get_vocab()
        ids = [i for p in parts for i in ([vocabulary[p]] if p in vocabulary else [vocabulary[c] for c in p])]
        ids += [vocabulary[end]] if end else []
        self.chat.note(tuple(ids))
        self.ids += ids
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        return tuple(ids)

    def observe(self, *messages: dict) -> Addition:
        addition = self.chat.add(messages)
        self.messages += messages
        self.ids = ([] if addition.is_fork else self.ids) + self.encode(addition.parts)
        return addition

    def whole(self, template: str | None = None) -> str:
        """Return all messages as the template writes them at once."""
        options = dict(tools=[*self.tools] or None, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.apply_chat_template(self.messages, chat_template=template, **options)

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids)


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
def test_what_messages_append_is_what_the_template_writes_of_all_at_once(template):
    sequence = Sequence(template)
    assert sequence.text == sequence.whole() and '"name": "add"' in sequence.text
    call = sequence.sample("<tool_call>", '{"name": "add~"}', "</tool_call>")
    before = list(sequence.ids)
    assert not sequence.observe(RESULT, RESULT).is_fork
    assert sequence.ids[: len(before)] == before and sequence.text == sequence.whole()
    assert sequence.text.count("<tool_response>") == 2 and sequence.text.count("<|im_start|>user") == 2, "as one turn"
    sequence.sample("It is 2~.")
    assert not sequence.observe({"role": "user", "content": "Sure?"}).is_fork
    assert sequence.text == sequence.whole()
    assert tuple(before[-len(call) :]) == call


def test_ids_stand_as_they_were_sampled_though_their_text_would_be_encoded_otherwise():
    sequence = Sequence(QWEN2_5)
    sampled = sequence.sample("o", "k", "~")
    sequence.observe(ASK)
    again = sequence.tokenizer._tokenizer(sequence.whole())["input_ids"]
    assert sequence.text == sequence.whole() and len(sequence.ids) == len(again) + 1, "o, k is one token when encoded"
    place = sequence.ids.index(sampled[0], len(sequence.ids) - 40)
    assert tuple(sequence.ids[place : place + len(sampled)]) == sampled


def test_thinking_stays_while_tools_answer_and_a_fork_begins_where_it_is_dropped():
    sequence = Sequence(QWEN3)
    first = sequence.sample("<think>", "\n", "hm~", "\n", "</think>", "\n", "\n", "o", "k", "~call")
    assert not sequence.observe(RESULT).is_fork
    assert sequence.text == sequence.whole() and "hm~" in sequence.text
    second = sequence.sample("<think>", "\n", "so~", "\n", "</think>", "\n", "\n", "2~")
    addition = sequence.observe({"role": "user", "content": "Sure?"})
    assert addition.is_fork
    assert sequence.text == sequence.whole() and "hm~" not in sequence.text and "so~" not in sequence.text
    # What was sampled and is left is context of the same ids: the guard would have raised on its text.
    reused = [part for part in addition.parts if not isinstance(part, str)]
    assert [reused[0][-7:], reused[1][-2:]] == [first[-8:-1], second[-3:-1]]
    sequence.sample("Yes~")
    assert not sequence.observe(RESULT).is_fork and sequence.text == sequence.whole(), "and goes on from there"


@pytest.mark.parametrize(("end", "written"), [("", "<|im_end|>\n"), ("<eos>", "<|im_end|>\n"), ("<|im_end|>", "\n")])
def test_a_turn_is_ended_once_however_it_was_cut(end, written):
    sequence = Sequence(QWEN2_5)
    sequence.sample("2~", end=end)
    (part,) = sequence.observe(ASK).parts
    assert part.startswith(f"{written}<|im_start|>user")


def test_white_space_that_a_template_trims_is_no_rewriting():
    sequence = Sequence(QWEN2_5.replace("message.content +", "message.content | trim +"))
    sampled = sequence.sample("\n", "2~ ", "\n")
    addition = sequence.observe(ASK)
    assert not addition.is_fork and addition.parts[0].startswith("\n<|im_start|>user")
    assert "".join(sequence.text.split()) == "".join(sequence.whole().split())
    assert tuple(sequence.ids[: -len(sequence.encode(addition.parts))][-len(sampled) :]) == sampled


def test_a_template_that_opens_with_thinking_and_writes_it_nowhere_later_forks():
    template = QWEN2_5.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}")
    sequence = Sequence(template)
    sequence.sample("hm~", "</think>", "2~")
    assert sequence.observe(ASK).is_fork and sequence.text == sequence.whole()
    assert sequence.text.count("<think>") == 1, "where the model goes on"


def test_text_that_is_no_message_belongs_to_the_turn_in_which_it_was_written():
    sequence = Sequence(QWEN2_5)
    sequence.sample("47*6~", end="")
    sequence.chat.note(" = 282; ")
    sequence.ids += sequence.encode((" = 282; ",))
    sequence.sample("282~")
    sequence.messages[-2:] = [{"role": "assistant", "content": "47*6~ = 282; 282~"}]
    assert not sequence.observe(ASK).is_fork and sequence.text == sequence.whole()


def test_ids_that_the_tokenizer_lacks_are_kept():
    sequence = Sequence(QWEN2_5)
    sequence.chat.note((20, 5000, sequence.end))
    (part,) = sequence.observe(ASK).parts
    assert part.startswith("\n<|im_start|>user")


def test_messages_that_the_template_refuses_are_named():
    refusing = QWEN2_5.replace("message.role == 'tool'", "raise_exception('no role ' + message.role)")
    sequence = Sequence(refusing)
    sequence.sample("2~")
    with pytest.raises(jinja2.TemplateError, match="no role tool"):
        sequence.observe(RESULT)


def test_sampled_ids_of_an_earlier_sequence_stand_behind_the_messages_before_them():
    """Not where a question says the same: that is text, which is encoded in its own way."""
    tokenizer = make_chat_tokenizer(QWEN2_5)
    o, k, ok = (tokenizer.get_vocab()[token] for token in ("o", "k", "ok"))
    said = [ASK, {"role": "assistant", "content": "ok"}, ASK, {"role": "assistant", "content": "ok"}, ASK]
    chat = Chat(tokenizer, said, sampled={1: (o, k), 3: (k,)})
    first, sampled, second, tail, third = chat.cut()
    assert (sampled, tail) == ((o, k), (k,)) and first + "ok" + second + "k" + third == chat.text
    assert first.endswith("1+1, ok?<|im_end|>\n<|im_start|>assistant\n")
    assert second == "<|im_end|>\n<|im_start|>user\n1+1, ok?<|im_end|>\n<|im_start|>assistant\no"
    assert tokenizer(first)["input_ids"].count(ok) == 1


@pytest.mark.parametrize("content", [{"sum": 2}, ["2"], 2, b"2", None], ids=str)
def test_content_that_is_no_text_is_refused(content):
    message = {"role": "tool", "content": content}
    sequence = Sequence(QWEN2_5)
    sequence.sample("2~")
    refused = r"message \d \(from 0\), of role 'tool', must have content of text or parts"
    with pytest.raises(ValueError, match=f"observe, {refused}"):
        sequence.observe(RESULT, message)
    with pytest.raises(ValueError, match=f"Episode, {refused}"):
        Chat(sequence.tokenizer, [message])


def test_a_call_without_content_reaches_the_template_as_it_is():
    template = "{% for m in messages %}{{ m.content is none }}{{ m.tool_calls[0].name }};{% endfor %}"
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert Chat(make_chat_tokenizer(template), [message]).text == "Trueadd;"
