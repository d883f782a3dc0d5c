"""Nine forms of a conversation under the templates of every family: learned as the template writes them, or refused.

The oracle is transformers' own rendering, cut by the rule that ``docs/data.md`` states. Its table is compared too.
"""

import json
from pathlib import Path

import pytest
from support.environments.forms import FORMS, TOOL
from support.environments.released import RELEASED

from rlworker.config.sections import DataConfig
from rlworker.data.chat.templates import render_messages
from rlworker.data.chat.turns import write_turn
from rlworker.data.conversations import ConversationEncoder, iterate_conversations

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
REFUSALS = {
    "a": "it leaves out the field 'reasoning_content' of the assistant's message",
    "b": "the chat template does not read tools",
    "c": "with the answer behind them it writes the messages before in another way",
    "d": "This model only supports single tool-calls at once!",
    "e": "Conversation roles must alternate",
}
"""Letter of the table -> beginning of the reason."""
ASK, SAY = FORMS["no thinking"]["messages"]


def count_common(first: str, second: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def encode(tokenizer, ends, row: dict, folder) -> list[tuple[str, list[tuple[int, str]]]]:
    """Encode a row: for each sequence its text, and where each learned text begins in it, with the text."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    (conversation,) = iterate_conversations(str(path), DataConfig())
    encoder = ConversationEncoder(tokenizer, tokenizer.convert_tokens_to_ids([*ends]), DataConfig())
    sequences = []
    for ids, spans, _ in encoder.encode(conversation, ()):
        learned = [(len(tokenizer.decode(ids[:first])), tokenizer.decode(ids[first:end])) for first, end in spans]
        sequences.append((tokenizer.decode(ids), learned))
    return sequences


def list_turns(tokenizer, row: dict) -> list[tuple[int, str]]:
    """List the turns to be learned, by transformers alone: where each begins in the text of all messages up to it, and
    that text."""
    messages, tools = row.get("messages"), row.get("tools")
    if messages is None:  # the completion goes on with the prompt's last message
        begun, rest = row["prompt"][-1], row["completion"][0]
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, continue_final_message=True)
        messages = [*row["prompt"][:-1], begun | {"content": begun["content"] + rest["content"]}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        return [(count_common(prompt, whole), whole)]
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, whole = (
                tokenizer.apply_chat_template(some, tools=tools, tokenize=False, add_generation_prompt=goes_on)
                for some, goes_on in ((messages[:number], True), (messages[: number + 1], False))
            )
            turns.append((count_common(prompt, whole), whole))
    return turns


def check(released, tokenizer, row: dict, folder) -> str:
    """Check a row against transformers' rendering, and return its cell of the table."""
    try:
        sequences = encode(tokenizer, released.ends, row, folder)
    except ValueError as error:
        assert "rows.jsonl, line 1: the chat template refuses these messages: " in str(error)
        (letter,) = (letter for letter, reason in REFUSALS.items() if f"messages: {reason}" in str(error))
        return letter
    learned = [(text, start, said) for text, turns in sequences for start, said in turns]
    for (text, start, said), (begin, whole) in zip(learned, list_turns(tokenizer, row), strict=True):
        assert start == begin and text[:start] == whole[:start]
        (end,) = (end for end in released.ends if said.endswith(end))
        # Where the template ends a turn by no token, it is the token that follows, or else the tokenizer's.
        written = said if end in whole[start:] else said.removesuffix(end)
        assert whole[start:].startswith(written) and len(written) > len(" is 4.") - 1
        assert whole[start + len(written) :].strip() in ("", tokenizer.eos_token)
        assert text[start:].startswith(said)
    (text, turns), (_, whole) = sequences[-1], list_turns(tokenizer, row)[-1]
    is_ended = any(end in whole[turns[-1][0] :] for end in released.ends)
    assert text == whole + ("" if is_ended else released.ends[0])
    return str(len(sequences))


def read_table() -> dict[str, list[str]]:
    """Read the table of the page: name of a template -> its cells."""
    head = "| template | thinking |"
    lines = PAGE.read_text().partition(head)[2].splitlines()[2:]
    table = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        table[name] = cells
    return table


@pytest.mark.parametrize("name", RELEASED)
def test_sequence_and_mask_are_those_of_the_whole_text_or_the_row_is_refused(name, tmp_path):
    released = RELEASED[name]
    tokenizer = released.make_tokenizer()
    cells = {form: check(released, tokenizer, row, tmp_path) for form, row in FORMS.items()}
    assert [*cells.values()] == read_table()[name]
    assert cells["no thinking"] == "1" and sorted(read_table()) == sorted(RELEASED)


@pytest.mark.parametrize(
    ("name", "answer", "learned"),
    [
        ("Qwen3.5", {"content": "<think>\nHm.\n</think>\n\n4"}, "Hm.\n</think>\n\n4<|im_end|>"),
        ("Qwen3.5", {"content": "4", "reasoning_content": "Hm."}, "Hm.\n</think>\n\n4<|im_end|>"),
        ("Qwen3.5 small", {"content": "4", "reasoning_content": "Hm."}, "Hm.\n</think>\n\n4<|im_end|>"),
        ("Qwen3.5 small", {"content": "4"}, "4<|im_end|>"),
        ("Qwen3.6", {"content": "4"}, "\n</think>\n\n4<|im_end|>"),
        ("GLM-4.5", {"content": "4", "reasoning_content": "Hm."}, "\n<think>Hm.</think>\n4"),
        ("Mistral v0.3", {"content": "4"}, " 4</s>"),
        ("Mistral Nemo", {"content": "4"}, "4</s>"),
        ("Phi-3", {"content": ""}, "<|end|>"),
        ("Llama 3.1", {"content": " 4 "}, "4<|eot_id|>"),
    ],
)
def test_an_answer_is_learned_as_its_template_writes_it(name, answer, learned):
    """Neither a tag of thinking twice, nor a space that a model of this family begins its answers with left out."""
    released = RELEASED[name]
    turn = write_turn([ASK], {"role": "assistant"} | answer, released.make_tokenizer(), released.ends)
    assert (turn.said, turn.has_end) == (learned, name != "GLM-4.5")


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("Qwen3.5", {"content": "<think>\nHm, 4"}, "so that <think> would be learned twice"),
        (
            "Qwen3",
            {"content": "<think>\nHm.\n</think>\n4", "reasoning_content": "So."},
            "<think> would be learned twice",
        ),
        (
            "Qwen3.5",
            {"content": "Hm. <think>\nSo.\n</think>\n4"},
            "it leaves out the content of the assistant's message",
        ),
        ("Llama 3", {"content": "4", "reasoning_content": "Hm."}, "leaves out the field 'reasoning_content'"),
        ("Mistral v0.3", FORMS["a tool call"]["messages"][1] | {"content": "See."}, "it leaves out the content"),
        ("Llama 3.1", FORMS["a tool call"]["messages"][1] | {"content": "See."}, "it leaves out the content"),
        ("Gemma 3", FORMS["a tool call"]["messages"][1], "it leaves out the call of 'add'"),
        ("Phi-3", {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "out the call of 'f'"),
    ],
)
def test_what_the_template_would_lose_or_double_is_refused(name, answer, message):
    released = RELEASED[name]
    with pytest.raises(ValueError, match=message):
        write_turn([ASK], {"role": "assistant"} | answer, released.make_tokenizer(), released.ends)


@pytest.mark.parametrize("content", [None, ""])
def test_no_word_stands_for_the_missing_content_of_a_tool_call(content):
    """GLM's template would write "None", which the model would learn and read."""
    released = RELEASED["GLM-4.5"]
    call = FORMS["a tool call"]["messages"][1] | {"content": content}
    turn = write_turn([ASK], call, released.make_tokenizer(), released.ends, [TOOL])
    assert turn.said.startswith("\n<think></think>\n<tool_call>add\n<arg_key>first</arg_key>")
    shown = render_messages([ASK, call, {"role": "tool", "content": "4"}], released.make_tokenizer(), [TOOL])
    assert "None" not in turn.said + shown


@pytest.mark.parametrize("name", RELEASED)
def test_a_prompt_that_ends_with_the_assistants_message_is_continued(name):
    """As transformers does by ``continue_final_message``; without it a second turn would begin."""
    tokenizer = RELEASED[name].make_tokenizer()
    for begun in ("The sum", "The sum is "):
        messages = [ASK, {"role": "assistant", "content": begun}]
        text = render_messages(messages, tokenizer)
        assert text == tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert text.rstrip().endswith(begun.rstrip())


def test_a_prefix_of_thinking_before_which_the_template_thinks_itself_is_refused():
    messages = [ASK, {"role": "assistant", "content": "<think>\nLet me"}]
    with pytest.raises(
        ValueError, match=r"thinking of its own before the assistant's last message, '<think>\\nLet me'"
    ):
        render_messages(messages, RELEASED["Qwen3.5"].make_tokenizer())
    assert render_messages(messages, RELEASED["Qwen2.5"].make_tokenizer()).endswith("assistant\n<think>\nLet me")
