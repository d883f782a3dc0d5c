"""Judges: their files, what they ask, how verdicts are read, and the classifiers beside them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.models import write_config
from tokenizers.processors import TemplateProcessing

from engines.batch.samples import Completion
from engines.config import ServedModelConfig
from engines.config.judge_form import JudgeForm
from engines.config.served import ClassifierSpec
from recipes.common.addition import make_tokenizer
from rlworker import RunConfig, parse_config

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
PROMPT = "prompt = 'Grade {{ text }}{% if rubric %} by {{ rubric }}{% endif %}.'\n"


@pytest.fixture
def read(tmp_path):
    def read_form(text: str) -> JudgeForm:
        (tmp_path / "judge.toml").write_text(text)
        return JudgeForm.read(str(tmp_path / "judge.toml"))

    return read_form


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 6 / 9),
        ("Score: 7/10", 6 / 9),
        ("7 out of 10.", 6 / 9),
        ("Between 3 and 4: 4.5", None),
        ("**2**/10", 1 / 9),
        ("[[2]]/10", 1 / 9),
        ("\\boxed{2} / 10", 1 / 9),
        ("2 (out of 10)", 1 / 9),
        ("2 points out of 10", 1 / 9),
        ("2 of 10", 1 / 9),
        ("Score: .5", None),
        ("10", 1.0),
        ("11", None),
        ("It is -3", None),
        ("good", None),
        ("", None),
    ],
)
def test_a_score_is_scaled_from_its_range(read, text, value):
    assert read(f'verdict = "score"\nrange = [1, 10]\n{PROMPT}').read_verdict(text) == (value and pytest.approx(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [("Yes", 1.0), ("no.", 0.0), ("<think>Yes?</think>No", 0.0), ("It is true", 1.0), ("yes, no", None)],
)
def test_a_boolean_is_one_or_zero(read, text, value):
    assert read(f'verdict = "boolean"\n{PROMPT}').read_verdict(text) == value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("verdict = score", "cannot be read as TOML"),
        (f"{PROMPT}", "has no verdict"),
        (f'verdict = "grade"\n{PROMPT}', "verdict must be one of 'score', 'boolean', 'choice', got 'grade'"),
        (f'verdict = "score"\nscale = 3\n{PROMPT}', "'scale' is no key of a judge; take one of verdict, prompt"),
        (f'verdict = "score"\nrange = [5, 5]\n{PROMPT}', "a lowest and a highest score"),
        (f'verdict = "choice"\n{PROMPT}', "options belong to verdict='choice'"),
        (f'verdict = "choice"\noptions = {{a = 2}}\n{PROMPT}', "expected values from 0 to 1"),
        (f'verdict = "boolean"\nrubric = {{short = 0}}\n{PROMPT}', "expected numbers above 0"),
        (f'verdict = "boolean"\nmax_tokens = 0\n{PROMPT}', "expected 1 or more tokens"),
        (f'verdict = "boolean"\nchat_template_args = {{tools = 1}}\n{PROMPT}', "may not set ['tools'], which each"),
        ('verdict = "boolean"\nprompt = "{% if %}"', "the template is wrong in its line 1"),
    ],
)
def test_a_wrong_file_is_refused_by_name(read, tmp_path, text, named):
    with pytest.raises(ValueError) as error:
        read(text)
    assert str(error.value).startswith(f"{tmp_path}/judge.toml: ") and named in str(error.value)


class Model:
    """Stands for a chat model: ``say(prompt, temperature)`` is its answer, cut where it ends with an ellipsis.

    Of scored ids it has logprobs by the last id.
    """

    def __init__(self, say):
        self.say, self.asked, self.tokenizer = say, [], make_tokenizer(CHAT)

    def __call__(self, requests, seed):
        self.asked.append((seed, [self.tokenizer.decode(one.token_ids) for one in requests]))
        return [self.answer(one) for one in requests]

    def answer(self, request) -> Completion:
        if request.sampling.scores_prompt:
            logprobs = np.zeros(len(request.token_ids) - 1, np.float32)
            logprobs[-1] = -float(request.token_ids[-1])
            return Completion(np.asarray(request.token_ids[1:], np.int32), logprobs, False, ((0, len(logprobs)),))
        text = self.say(self.tokenizer.decode(request.token_ids), request.sampling.temperature)
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        return Completion(ids, np.zeros(0, np.float32), not text.endswith("..."), ((0, len(ids)),))


@pytest.fixture
def make_judge(read, tmp_path):
    def make(form: str, say=lambda prompt, temperature: "5"):
        from rlworker.rollouts.scoring.judge import Judge

        make_tokenizer(CHAT).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
        model = Model(say)
        return Judge("grader", str(tmp_path), 99, read(form + PROMPT), 64, model), model

    return make


def test_what_cannot_be_read_is_asked_once_more_and_then_counted(make_judge):
    judge, model = make_judge(
        'verdict = "score"\nmax_tokens = 8\n',
        lambda prompt, temperature: (
            "4" if "a" in prompt.split("Grade")[1] else "none" if not temperature else "x9"[len(prompt) % 2]
        ),
    )
    first, even, odd = judge.answer([{"text": "a"}, {"text": "12"}, {"text": "123"}], 7)
    assert first.value == 0.4 and first.texts == ("4",) and first.unreadable == 0
    assert sorted([(even.error != "", even.unreadable), (odd.error != "", odd.unreadable)]) == [(False, 0), (True, 1)]
    assert [(seed, len(prompts)) for seed, prompts in model.asked] == [(7, 3), (8, 2)], "another seed, those alone"
    assert model.asked[0][1][0] == "<user>Grade a.<unk>>", "the chat template's line break is unknown to the tokenizer"


def test_an_answer_that_was_cut_is_no_verdict(make_judge):
    """Its number may be one of a list, and is asked for once more."""
    judge, model = make_judge(
        'verdict = "score"\nmax_tokens = 8\n', lambda prompt, temperature: "5" if temperature else "1..."
    )
    (verdict,) = judge.answer([{"text": "a"}], 0)
    assert (verdict.value, verdict.texts, len(model.asked)) == (0.5, ("5",), 2)


def test_a_judge_takes_variables_of_its_chat_template(read, tmp_path):
    from rlworker.rollouts.scoring.judge import Judge

    make_tokenizer(CHAT + "{% if enable_thinking is false %}!{% endif %}").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    forms = [
        read(f'verdict = "score"\nmax_tokens = 8\nchat_template_args = {{{arguments}}}\n{PROMPT}')
        for arguments in ("", "enable_thinking = false", "enable_thought = false")
    ]
    for form, end in zip(forms[:2], (">", ">!"), strict=True):
        model = Model(lambda prompt, temperature: "5")
        Judge("grader", str(tmp_path), 99, form, 64, model).answer([{"text": "a"}], 0)
        assert model.asked[0][1][0].endswith("Grade a.<unk>" + end)
    with pytest.raises(ValueError, match=r"grader\.template: chat_template_args has 'enable_thought', .* did you mean"):
        Judge("grader", str(tmp_path), 99, forms[2], 64, Model(str))


def test_a_rubric_asks_each_criterion_and_weighs_them(make_judge):
    judge, model = make_judge(
        'verdict = "score"\nmax_tokens = 8\nrubric = {short = 1, right = 3, kind = 4}\n',
        lambda prompt, temperature: "2" if "short" in prompt else "10" if "right" in prompt else "?",
    )
    (verdict,) = judge.answer([{"text": "a"}], 0)
    assert verdict.value == pytest.approx((0.2 + 3 * 1.0) / 4), "of those that could be read"
    assert verdict.texts == ("2", "10", "?") and verdict.unreadable == 1 and not verdict.error
    assert len(model.asked[0][1]) == 3 and len(model.asked[1][1]) == 1


def test_a_choice_weighs_its_options_by_their_probabilities(make_judge):
    judge, model = make_judge('verdict = "choice"\noptions = {A = 1, B = 0, C = 0.5}\n')
    (verdict,) = judge.answer([{"text": "a"}], 0)
    chances = np.exp(-np.arange(3.0))  # ids follow one another
    assert verdict.value == pytest.approx(chances @ [1, 0, 0.5] / chances.sum()) and verdict.texts == ("A",)
    assert [prompt[-1] for prompt in model.asked[0][1]] == ["A", "B", "C"]


def test_a_question_that_cannot_be_asked_says_why(make_judge):
    judge, model = make_judge('verdict = "score"\nmax_tokens = 8\n')
    long, lacking, text, fine = judge.answer([{"text": "a" * 60}, {"txt": "a"}, "a", {"text": "a"}], 0)
    assert "there is room for 56 beside the answer; raise --models.grader.max-model-len" in long.error
    assert "'text' is undefined; the question has ['txt']" in lacking.error
    assert "policy.judge" in text.error and fine.value == 0.5
    assert len(model.asked[0][1]) == 1


CLASSIFIER = {
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "intermediate_size": 6,
    "max_position_embeddings": 64,
    "id2label": {"0": "bad", "1": "good"},
}


@pytest.mark.parametrize(
    ("changes", "settings", "named"),
    [
        ({}, {}, "has 2 labels, bad, good; set --models.rm.label"),
        ({}, {"label": "fine"}, "label='fine' is none of the classifier's labels, bad, good"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "'LlamaForCausalLM', expected one that ends in ForSequence"),
        ({}, {"label": "good", "tp": 3}, "tp=3 does not divide the model's 4 attention heads"),
        ({}, {"label": "good", "tp": 4}, "tp=4 does not divide the model's 6 ffn size"),
        ({"max_position_embeddings": None}, {"label": "good"}, "has no max_position_embeddings"),
    ],
)
def test_a_folder_that_is_no_such_classifier_is_refused(tmp_path, changes, settings, named):
    folder = write_config(tmp_path, CLASSIFIER, **changes)
    with pytest.raises(ValueError) as error:
        ClassifierSpec.from_folder(folder, "rm", ServedModelConfig(folder, "classifier", **settings))
    assert str(error.value).startswith("models.rm: ") and named in str(error.value)


def test_a_classifier_knows_the_place_of_its_label(tmp_path):
    folder = write_config(tmp_path, CLASSIFIER)
    spec = ClassifierSpec.from_folder(folder, "rm", ServedModelConfig(folder, "classifier", label="good"))
    assert (spec.task, spec.place, spec.max_positions) == ("classify", 1, 64)
    folder = write_config(tmp_path, CLASSIFIER, max_position_embeddings=None, n_positions=32)  # as GPT-2 calls it
    assert ClassifierSpec.from_folder(folder, "rm", ServedModelConfig(folder, "classifier", label="good")) == replace(
        spec, max_positions=32
    )


def test_a_text_goes_to_a_classifier_as_its_tokenizer_writes_it(tmp_path):
    from rlworker.rollouts.scoring.classifier import Classifier

    tokenizer, asked = make_tokenizer(None), []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="7 $A 8", special_tokens=[("7", 5), ("8", 6)]
    )
    tokenizer.eos_token = None  # BERT has none
    tokenizer.save_pretrained(tmp_path)
    compute = lambda prompts: asked.extend(prompts) or [np.ones((len(ids), 2)) for ids in prompts]  # noqa: E731
    classifier = Classifier("rm", ClassifierSpec(str(tmp_path), "classify", 1, 64), 64, compute)
    assert [verdict.value for verdict in classifier.answer(["1+2"], 0)] == [1.0]
    assert asked == [[5, *tokenizer("1+2", add_special_tokens=False)["input_ids"], 6]]


def test_a_command_line_names_models():
    default = RunConfig(models={"old": ServedModelConfig("A", template="old.toml")})
    words = [
        "--models.new.model",
        "B",
        "--models.new.kind=classifier",
        "--models.old.max_model_len",
        "7",
        "--models.new.tp",
        "2",
    ]
    assert parse_config(default, args=words).models == {
        "new": ServedModelConfig("B", "classifier", tp=2),
        "old": ServedModelConfig("A", template="old.toml", max_model_len=7),
    }


@pytest.mark.parametrize("word", ["--models.new.modle", "--models.a-b.model", "--models.model"])
def test_a_wrong_name_or_key_of_a_model_is_refused(word):
    with pytest.raises(SystemExit, match=r"expected --models.NAME.KEY, .* KEY of model, kind, template, label"):
        parse_config(RunConfig(), args=[word, "x"])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "no model was given; set --models.one.model"),
        ({"model": "A"}, "set --models.one.template, or --models.one.kind classifier"),
        ({"model": "A", "template": "B", "label": "C"}, "label='C' is of classifiers"),
        ({"model": "A", "kind": "classifier", "template": "B"}, "template='B' is of judges"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, named):
    with pytest.raises(ValueError) as error:
        ServedModelConfig(**settings).check("one")
    assert str(error.value).startswith("models.one: ") and named in str(error.value)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"weight": 2.0, "tp": 2, "engines": 3}, ""),
        ({"label": "good"}, "models.one.label was '', is 'good'"),
        ({"model": "B"}, "models.one.model was 'A', is 'B'"),
    ],
)
def test_a_resumed_run_keeps_what_decides_verdicts(tmp_path, changes, refused):
    from dataclasses import asdict, replace

    from rlworker.config.changes import read_changes

    config = RunConfig(models={"one": ServedModelConfig("A", "classifier")})
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    changed = replace(config, models={"one": replace(config.models["one"], **changes)})
    if not refused:
        assert read_changes(tmp_path, changed).keys() == {f"models.one.{name}" for name in changes}
        return
    with pytest.raises(ValueError) as error:
        read_changes(tmp_path, changed)
    assert refused in str(error.value)
    if "model" in changes:
        assert read_changes(tmp_path, changed, {"models.one.model"}), "a folder of the same digests may be moved"
