"""Text behind other tokens: its ids are those that transformers makes of the whole, from the boundary on."""

from copy import copy
from itertools import product

import numpy as np
import pytest
from support.environments.rows import learn
from support.environments.tokenizers import KINDS, TEMPLATES, make_tokenizer

from recipes.common import squares
from rlworker.data.encoding import decode_after, encode_after
from rlworker.data.rows import Row
from rlworker.environments.codec import Codec, using_codec
from rlworker.environments.episode import Episode

ASK, SAY = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "The answer is 42."}
BEFORE = ("The answer ", "a =", "4", "ok\n", "<s>", "x</s>", "é", "It is")
BEHIND = ("The answer", " is", "\nThe", "  b", "2", "é", "= 4", "</s>\nHi", ".", " ", "\n")


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_behind_a_boundary_has_the_ids_of_the_whole(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
    merges = 0
    for before, text in product((*BEFORE, prompt), BEHIND):
        head, whole = encode(tokenizer, before), encode(tokenizer, before + text)
        found = encode_after(tokenizer, head[-1], text)
        if whole[: len(head)] == head:
            assert found == whole[len(head) :], (before, text)
        else:  # the ids before stay, and what follows says the same
            merges += 1
            assert decode_after(tokenizer, head[-1], found) == text, (before, text)
    assert 0 < merges < 20
    assert encode_after(tokenizer, None, "The answer") == encode(tokenizer, "The answer")


def test_a_tokenizer_of_whole_words_keeps_the_first_word_behind_a_boundary():
    """A letter that it does not know merges with the word into the same unknown token."""
    tokenizer = squares.make_tokenizer()
    for before, text in product(("?", "red", "<|vision_end|>"), ("3", "red 3", "<image> ?", "<eos>", "unheard 3")):
        assert encode_after(tokenizer, encode(tokenizer, before)[-1], text) == encode(tokenizer, text), (before, text)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_learned_with_the_ids_of_the_whole(kind, tmp_path, make_hf_model):
    tokenizer = make_tokenizer(kind)
    texts = [("It is:", " 42"), ("It is:\n", "The answer"), ("4 + 4 =", "8")]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in texts]
    for (prompt, answer), example in zip(texts, learn(tokenizer, tmp_path, make_hf_model, *rows)[0], strict=True):
        assert list(example.ids) == [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
        assert list(example.ids[: example.prompt_length]) == tokenizer(prompt)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_in_a_chat_is_learned_as_the_template_writes_it_up_to_its_end(kind, tmp_path, make_hf_model):
    """Phi-3's template writes another end behind it, Qwen's a newline: the model must produce neither."""
    tokenizer, ends = make_tokenizer(kind), {"phi3": "<|end|>", "qwen": "<|im_end|>"}
    for content in ("The answer is 42.", " 42 ", ""):
        answer = SAY | {"content": content}
        examples, _ = learn(tokenizer, tmp_path, make_hf_model, {"prompt": [ASK], "answer": content})
        whole = encode(tokenizer, tokenizer.apply_chat_template([ASK, answer], tokenize=False))
        end = tokenizer.convert_tokens_to_ids(ends.get(kind, "</s>"))
        prompt = encode(tokenizer, tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False))
        assert list(examples[0].ids) == whole[: whole.index(end, len(prompt)) + 1]
        assert examples[0].prompt_length == len(prompt)


def test_an_answer_is_learned_behind_what_prompt_and_whole_text_begin_with(tmp_path, make_hf_model):
    tokenizer, row = copy(make_tokenizer("qwen")), {"prompt": [ASK], "answer": "Hi T? 42"}
    for template, end in (
        (TEMPLATES["qwen"].replace("assistant\\n' }}", "assistant\\n<T>' }}"), "<|im_end|>"),  # a prompt alone has it
        (TEMPLATES["qwen"].replace("'<|im_end|>\\n'", "'\\n'"), "<|endoftext|>"),  # no token ends it
    ):
        tokenizer.chat_template = template
        ((example,), _) = learn(tokenizer, tmp_path, make_hf_model, row)
        whole = tokenizer.apply_chat_template([ASK, SAY | {"content": "Hi T? 42"}], tokenize=False)
        assert tokenizer.decode(example.ids) == whole.rstrip().removesuffix(end) + end
        assert tokenizer.decode(example.ids[example.prompt_length :]) == "Hi T? 42" + end
    tokenizer.chat_template = TEMPLATES["qwen"].replace("m.content +", "m.content.split('T?')[-1] +")
    with pytest.raises(ValueError, match=r"line 1: .* it leaves out the content of the assistant's message"):
        learn(tokenizer, tmp_path, make_hf_model, row)
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[1].role) if messages[1] else 'Hi' }}"
    with pytest.raises(ValueError, match=r"refuses 'Hi T. 42' as the assistant's message: no assistant"):
        learn(tokenizer, tmp_path, make_hf_model, row)


@pytest.mark.parametrize("kind", KINDS)
def test_observed_text_and_messages_have_the_ids_of_the_whole_conversation(kind):
    """Also a piece of text that follows another, and what a template adds behind a sample that was cut."""
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([ASK, SAY, ASK], add_generation_prompt=True, tokenize=False)
    cut = whole.index(SAY["content"]) + len(SAY["content"])
    end = next(len(text) for text in (" </s>", "</s>", "<|end|>", "<|im_end|>") if whole[cut:].startswith(text))
    row = Row(prompt, tuple(encode(tokenizer, prompt)), "", {}, messages=(ASK,))
    for place in (cut, cut + end):
        ids = encode(tokenizer, whole[:place])
        with using_codec(Codec(tokenizer, (ids[-1],) if place > cut else ())):
            episode = Episode(row)
            episode.add_sample(np.array(ids[len(row.prompt_ids) :]))
            episode.observe([ASK])
            assert tokenizer.decode(episode.token_ids) == tokenizer.decode(encode(tokenizer, whole))
            assert episode.token_ids == encode(tokenizer, whole)
    with using_codec(Codec(tokenizer)):
        episode = Episode(row, "It is")
        for text in (" the answer", "\n", "The", " b", ""):
            episode.observe(text)
        assert episode.token_ids == tokenizer("It is the answer\nThe b")["input_ids"]
        episode.fork("It is")
        assert episode.token_ids == tokenizer("It is")["input_ids"], "opened as rows of text are"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_keeps_sampled_ids_and_the_space_that_begins_them(kind):
    """A template that drops thinking leaves the rest of a sample, whose first token begins with a space or not.

    Llama 2's and Mistral's templates put a space there, and Phi-3's tokenizer does: those would merge with digits.
    """
    tokenizer = copy(make_tokenizer(kind))
    tokenizer.chat_template = TEMPLATES[kind].replace("m.content +", "m.content.split('T?')[-1] +")
    for answer in (" It is 42.",) if kind in ("llama2", "mistral", "phi3") else (" It is 42.", "42 is it."):
        messages = [ASK, SAY | {"content": "Hi T?" + answer}, ASK]
        prompt, whole = (
            tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False)
            for each in (messages[:1], messages)
        )
        sampled = encode(tokenizer, prompt + messages[1]["content"])[len(encode(tokenizer, prompt)) :]
        with using_codec(Codec(tokenizer)):
            episode = Episode(Row(prompt, tuple(encode(tokenizer, prompt)), "", {}, messages=(ASK,)))
            episode.add_sample(np.array(sampled))
            episode.observe([ASK])
        assert episode.forks == 1 and episode.token_ids == encode(tokenizer, whole)
