"""What stands before a prompt: the special tokens that a tokenizer opens a text with."""

from dataclasses import replace

import pytest
from PIL import Image
from support.environments.rows import learn, write
from tokenizers.processors import TemplateProcessing

from engines.models.spec import ModelSpec
from recipes.common.addition import make_tokenizer
from rlworker.checks.tiny.models import IMAGE_TOKENS, make_tiny_vlm
from rlworker.config.sections import DataConfig
from rlworker.data.images import build_image_reader
from rlworker.data.rows import load_tokenizer, read_rows

DATA = DataConfig(max_prompt_tokens=20)
ROW = {"prompt": "1+1=", "answer": "2"}


def framed(tokenizer, template: str):
    """The tokenizer with a post-processor that puts special tokens around a text ``$A``."""
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize(
    ("template", "opening"),
    [("$A", []), ("<bos> $A", [1]), ("<bos> $A <eos>", [1]), ("$A <eos>", []), ("<eos> <bos> $A <eos> <eos>", [2, 1])],
)
def test_text_has_what_the_tokenizer_puts_before_it_and_nothing_behind(tmp_path, template, opening):
    tokenizer = framed(make_tokenizer(), template)
    tokenizer.chat_template = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "u", "content": "1+1="}]
    path = write(tmp_path, {"prompt": messages, "answer": "2"}, ROW, {"prompt": "<bos>3", "answer": "3"})
    chat, text, written = (list(row.prompt_ids) for row in read_rows(path, tokenizer, DATA).rows)
    bare = tokenizer.convert_tokens_to_ids(list("1+1="))
    assert text == opening + bare
    assert tokenizer("1+1=")["input_ids"][: len(text)] == text, "as transformers begins"
    assert chat == [1, *bare], "the template has written its own"
    three = tokenizer.convert_tokens_to_ids("3")
    assert written == ([2, 1, 1, three] if opening == [2, 1] else [1, three]), "no second one"
    path = write(tmp_path, ROW)
    (row,) = read_rows(path, tokenizer, replace(DATA, instruction="?")).rows
    assert row.prompt_ids[0] == 1 and row.prompt_ids[1] == bare[0] and 2 not in row.prompt_ids
    (row,) = read_rows(path, tokenizer, replace(DATA, max_prompt_tokens=len(opening) + 4)).rows
    assert row.prompt == "1+1=" and len(row.prompt_ids) == len(opening) + 4
    with pytest.raises(ValueError, match=f"has {len(opening) + 4} tokens"):  # they count
        read_rows(path, tokenizer, replace(DATA, max_prompt_tokens=len(opening) + 3))


def test_a_first_row_that_is_an_opening_alone_leaves_the_others_theirs(tmp_path):
    path = write(tmp_path, {"prompt": "<bos>", "answer": "2"}, {"prompt": "3", "answer": "3"})
    rows = read_rows(path, framed(make_tokenizer(), "<bos> $A <eos>"), DATA).rows
    assert [row.prompt_ids for row in rows] == [(1,), (1, *make_tokenizer().convert_tokens_to_ids(["3"]))]


def test_a_tokenizer_that_takes_a_text_for_another_with_special_tokens_is_refused(tmp_path):
    def tokenizer(texts, add_special_tokens=True, **options):
        return {"input_ids": [1, 7, 8] if add_special_tokens else [[7, 9]], "special_tokens_mask": [1, 0, 0]}

    with pytest.raises(ValueError, match=r"makes \[1, 7, 8\] of '1\+1=' with its special tokens, expected \[7, 9\]"):
        read_rows(write(tmp_path, ROW), tokenizer, DATA)


def test_an_answer_is_not_opened(tmp_path, make_hf_model):
    tokenizer = framed(make_tokenizer(), "<bos> $A <eos>")
    ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, ROW, data=DATA, max_answer_tokens=8)
    assert example.prompt_length == 5
    assert example.ids == (1, *tokenizer.convert_tokens_to_ids(list("1+1=2")), 2), "one end, which is learned"


def test_a_prompt_with_an_image_is_opened(tmp_path):
    folder = make_tiny_vlm(
        tmp_path / "model", "qwen2_5_vl", framed(make_tokenizer(None, IMAGE_TOKENS), "<bos> $A"), 128
    )
    Image.new("RGB", (84, 56)).save(tmp_path / "a.png")
    path = write(tmp_path, {"prompt": "<image>x", "images": ["a.png"], "answer": "y"})
    model, tokenizer = ModelSpec.from_folder(folder), load_tokenizer(folder)
    (row,) = read_rows(path, tokenizer, DATA, build_image_reader(model, str(tmp_path / "run"), 64)).rows
    vision = model.vision
    x = tokenizer.convert_tokens_to_ids("x")
    assert row.prompt_ids == (1, vision.start_token, *[vision.image_token] * 6, vision.end_token, x)
    assert row.prompt == "<|vision_start|><|image_pad|><|vision_end|>x"


def test_a_row_knows_the_messages_of_its_prompt(tmp_path):
    """So that further ones can follow them; text that stays text has none."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    message = {"role": "user", "content": "1+1="}
    path = write(tmp_path, {"prompt": [message], "answer": "2"}, ROW)
    chat, text = read_rows(path, tokenizer, DATA).rows
    assert chat.messages == (message,) and text.messages == ()
    asked = read_rows(write(tmp_path, ROW), tokenizer, replace(DATA, instruction="?")).rows[0]
    assert asked.messages == ({"role": "user", "content": "1+1=\n\n?"},)
