import json

import pytest

from recipes.addition import is_heldout, make_data, make_tokenizer
from rlworker.data import read_rows, rows_of_step


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def write(tmp_path, *rows) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_text_and_messages(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
    messages = [{"role": "u", "content": "1+1"}]
    path = write(tmp_path, {"prompt": "1+1=", "answer": "2", "level": 3}, "", {"prompt": messages, "answer": "2"})
    text, chat = read_rows(path, tokenizer, 20)
    assert (text.prompt, text.answer, text.source["level"]) == ("1+1=", "2", 3)
    assert tokenizer.decode(list(text.prompt_ids)) == "1+1=" and len(text.prompt_ids) == 4
    assert chat.prompt == "u:1+1;a:"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, 'line 2: field "prompt" is missing or empty'),
        ({"prompt": "", "answer": "2"}, 'line 2: field "prompt" is missing or empty'),
        ({"prompt": "1+1="}, 'line 2: field "answer" must be text, got NoneType'),
        ({"prompt": "1+1=", "answer": 2}, 'line 2: field "answer" must be text, got int'),
        ({"prompt": "1" * 30, "answer": "2"}, 'line 2: field "prompt" has 30 tokens, expected 1 to 20'),
        ({"prompt": 7, "answer": "2"}, 'line 2: field "prompt" must be text or a list'),
        ({"prompt": [{"role": "u"}], "answer": "2"}, 'line 2: field "prompt" must be text or a list'),
        ({"prompt": [{"role": "u", "content": "x"}], "answer": "2"}, "has no chat template"),
        ("{broken", "line 2: not JSON"),
        ("[1]", "line 2: expected an object, got list"),
    ],
)
def test_a_broken_row_is_named(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=r"rows\.jsonl") as error:
        read_rows(write(tmp_path, {"prompt": "1+1=", "answer": "2"}, row), tokenizer, 20)
    assert message in str(error.value)


def test_no_file_and_no_rows(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="does not exist"):
        read_rows(str(tmp_path / "none.jsonl"), tokenizer, 20)
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(write(tmp_path, ""), tokenizer, 20)


def test_steps_walk_whole_epochs_in_new_orders():
    rows = list(range(10))
    seen = [row for step in range(5) for row in rows_of_step(rows, 4, step, seed=1)]
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == rows and first != second
    assert rows_of_step(rows, 4, 2, seed=1) == seen[8:12], "a step may straddle two epochs and needs no state"
    assert rows_of_step(rows, 4, 0, seed=2) != seen[:4]


def test_heldout_additions_are_apart_and_without_pattern(tmp_path):
    folder = make_data(tmp_path)
    train, heldout = ([json.loads(line) for line in (folder / f"{name}.jsonl").open()] for name in ("train", "heldout"))
    prompts = [{row["prompt"] for row in rows} for rows in (train, heldout)]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 10_000
    assert 900 < len(heldout) < 1100
    assert all(sum(map(int, row["prompt"][:-1].split("+"))) == int(row["answer"]) for row in heldout)
    ends = [sum(is_heldout(a, b) for a in range(100) for b in range(100) if (a + b) % 10 == end) for end in range(10)]
    assert min(ends) > 60, "every last digit is held out about as often"
