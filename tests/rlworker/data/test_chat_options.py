"""A system message and variables of the chat template, by option."""

import json
import pickle
from dataclasses import replace

import pytest

from recipes.common.addition import make_tokenizer
from rlworker.checks.tiny.models import IMAGE_TOKENS
from rlworker.config.sections import DataConfig
from rlworker.data.chat.messages import set_template_arguments
from rlworker.data.chat.templates import render_messages
from rlworker.data.conversations import iterate_conversations
from rlworker.data.rows import check_rows, load_tokenizer, read_rows

TEMPLATE = """
{%- macro say(m) %}{% if think is defined and not think %}[quick]{% endif %}{{ m.role }}:{{ m.content }};{% endmacro -%}
{{ style | default("plain") }}
{% for m in messages %}{{ say(m) }}{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
USER = {"role": "user", "content": "1+1="}
INTERNVL = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part.type == 'video' %}{{ '<clip>\n' }}{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)
QWEN = (
    "{% set seen = namespace(images=0, videos=0) %}{% for m in messages %}{{ m.role + ':' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "{% set seen.images = seen.images + 1 %}{% if add_vision_id %}Picture {{ seen.images }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "{% set seen.videos = seen.videos + 1 %}{% if add_vision_id %}Video {{ seen.videos }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}"
)
GEMMA3 = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
PARTS = (*IMAGE_TOKENS, "<IMG_CONTEXT>", "<clip>", "<start_of_image>")
"""Tokens that these templates write for parts, as those of the released models do."""


def save(tmp_path, template: str | None) -> str:
    make_tokenizer(template).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("template", [TEMPLATE, "\n\n" + TEMPLATE.replace("{%- macro", "{% macro")])
@pytest.mark.parametrize("arguments", [{}, {"think": False}, {"think": True, "style": 'a "b" \\ {% c'}, {"style": 3}])
def test_variables_of_the_template_are_those_that_transformers_would_be_given(tmp_path, template, arguments):
    folder = save(tmp_path, template)
    want = load_tokenizer(folder).apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **arguments)
    tokenizer = load_tokenizer(folder, arguments)
    for each in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert render_messages([USER], each) == want
    assert ("[quick]" in want) == (arguments.get("think") is False)


@pytest.mark.parametrize(
    ("template", "arguments", "want"),
    [
        (INTERNVL, {}, "u:See<image>\n<image>\n\n?;a:A <image>;u:<video>\n.;"),
        (QWEN, {}, "u:See<image><image>\n?;a:A <image>;u:<video>.;"),
        (
            QWEN,
            {"add_vision_id": True},
            "u:SeePicture 1: <image>Picture 2: <image>\n?;a:A <image>;u:Video 1: <video>.;",
        ),
        (GEMMA3, {}, "u:See<image><image>?;a:A <image>;u:<video>.;"),
        ("{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}", {}, None),
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", {}, None),
    ],
)
def test_parts_are_written_as_the_template_writes_them(template, arguments, want):
    """With a newline or a number beside an image, each text trimmed; a template of text alone is given markers."""
    see, ask, video = ({"type": "text", "text": text} for text in ("See", "\n?", "."))
    messages = [
        {"role": "u", "content": [see, {"type": "image"}, {"type": "image"}, ask]},
        {"role": "a", "content": "A <image>"},
        {"role": "u", "content": [{"type": "video"}, video]},
    ]
    tokenizer = make_tokenizer(template, PARTS)
    set_template_arguments(tokenizer, arguments)
    assert render_messages(messages, tokenizer) == (want or "u:See<image><image>\n?;a:A <image>;u:<video>.;")


def test_tools_that_no_template_reads_are_refused():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(ValueError, match="the chat template does not read tools, so that the model would not see them"):
        render_messages([{"role": "user", "content": "?"}], make_tokenizer("{{ messages[0].content }}"), tools=[tool])


def test_variables_that_no_template_reads_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"^data: chat_template_args has 'thin', which the chat template does not read"
    ):
        load_tokenizer(save(tmp_path, TEMPLATE), {"thin": False})
    with pytest.raises(ValueError, match="did you mean 'think'"):
        load_tokenizer(save(tmp_path, TEMPLATE), {"thin": False})
    with pytest.raises(
        ValueError, match=r"^data: chat_template_args sets think, and the tokenizer has no chat template"
    ):
        load_tokenizer(save(tmp_path / "bare", None), {"think": False})
    with pytest.raises(ValueError, match=r"^data: chat_template_args may not set \['tools'\]"):
        DataConfig(chat_template_args={"tools": 1})


def test_a_system_message_begins_every_chat_that_has_none(tmp_path):
    own = [{"role": "system", "content": "Own."}, USER]
    rows = [{"prompt": prompt, "answer": "2"} for prompt in ("1+1=", [USER], own)]
    path, data = tmp_path / "rows.jsonl", DataConfig(system="Add.")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_rows(str(path), data)
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    prompts = [row.prompt for row in read_rows(str(path), tokenizer, data).rows]
    assert prompts == ["system:Add.;user:1+1=;"] * 2 + ["system:Own.;user:1+1=;"]
    text = replace(data, instruction="Now!")
    path.write_text(json.dumps(rows[0]) + "\n")
    assert read_rows(str(path), tokenizer, text).rows[0].prompt == "system:Add.;user:1+1=\n\nNow!;"
    with pytest.raises(ValueError, match=r'would become a message by data\.system, .*; set --data\.system ""'):
        read_rows(str(path), make_tokenizer(), data)


def test_a_conversation_has_the_system_message_too(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "2"}]}) + "\n")
    (chat,) = iterate_conversations(str(path), DataConfig(system="Add."))
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
