"""Classifiers and judges on real engines against transformers: batched, cut over two devices, after a lost engine; and
runs that ask them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from types import MappingProxyType

import pytest
import torch
from kill_chain import read_metrics_without_times

from engines.config import MegatronConfig, OptimizerConfig, ServedModelConfig, VllmConfig
from recipes.common.addition import make_data, make_tokenizer
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig, EnvironmentConfig, RecoveryConfig
from rlworker.environments.parts import combine_parts
from rlworker.tracking.log import name_samples

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("cluster")]
LIMIT = 1e-5
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
FORMS = {
    "choice": 'verdict = "choice"\noptions = {A = 1, B = 0.5, C = 0}\nrubric = {"short?" = 1, "right?" = 3}\n',
    "score": 'verdict = "score"\nrange = [0, 9]\nmax_tokens = 8\n',
}
PROMPT = "prompt = 'How good is {{ text }} to {{ question }}? {{ rubric }}'\n"
ROLLOUT = VllmConfig(max_new_tokens=4, max_model_len=32, max_num_seqs=64, kv_cache_mb=64)


@pytest.fixture(scope="module")
def chat_model(make_hf_model):
    """The folder of a chat model that answers at random."""
    folder = make_hf_model("qwen2", True)
    make_tokenizer(CHAT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def make_classifier(chat_model, tmp_path_factory):
    """``make(head, labels)`` -> folder of a classifier over the chat model's body."""

    def make(head: str, labels: int) -> str:
        import transformers

        folder = tmp_path_factory.mktemp(f"{head}{labels}")
        torch.manual_seed(labels)
        kind = getattr(transformers, f"AutoModelFor{head}Classification")
        model = kind.from_pretrained(chat_model, num_labels=labels)
        torch.nn.init.normal_(model.score.weight, std=0.1)
        model.save_pretrained(folder)
        make_tokenizer(CHAT).save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def write_form(tmp_path_factory):
    def write(form: str) -> str:
        path = tmp_path_factory.mktemp("forms") / f"{form}.toml"
        path.write_text(FORMS[form] + PROMPT)
        return str(path)

    return write


@pytest.fixture
def serve(cluster):
    """``serve(**models)`` -> engines of served models by name, which end with the test."""
    from contextlib import ExitStack

    from engines.models.hub import find_model
    from rlworker.rollouts.scoring import check_served, start_groups

    with ExitStack() as running:

        def start(**models: ServedModelConfig):
            config = RunConfig(data=DataConfig(max_prompt_tokens=8), rollout=ROLLOUT, models=models)
            groups = start_groups(check_served(config, find_model), config, running.enter_context)
            for group in groups.values():
                group.wait()
                group.replace_engines(lambda lost: None)
            return groups

        yield start


def draw_chats(count: int) -> list[list[dict[str, str]]]:
    random = Random(0)
    texts = ["".join(chr(random.randrange(48, 90)) for _ in range(random.randrange(1, 60))) for _ in range(count)]
    return [[{"role": "user", "content": text[::2]}, {"role": "assistant", "content": text}] for text in texts]


def answer(group, contents: list, seed: int = 0) -> list:
    """Ask the first engine in one call, or the one that takes its place."""
    from rlworker.rollouts.scoring.worker import ScoringWorker

    return group.call(ScoringWorker.answer, contents, seed)[0]


def score_by_transformers(folder: str, head: str, chats: list) -> list[torch.Tensor]:
    """The logits ``[T, labels]`` of each chat, alone in its forward pass."""
    import transformers

    model = getattr(transformers, f"AutoModelFor{head}Classification").from_pretrained(folder, dtype=torch.float32)
    tokenizer, found = make_tokenizer(CHAT), []
    for chat in chats:
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        found.append(logits.reshape(-1, logits.shape[-1]))
    return found


@pytest.mark.large
def test_scores_are_transformers_logits_after_a_lost_engine_too(serve, make_classifier, measured):
    import ray

    cases = {"halves": ("Sequence", 3, 2), "tokens": ("Token", 1, 1)}
    """Name -> head, labels and devices of each engine."""
    folders = {name: make_classifier(head, labels) for name, (head, labels, _) in cases.items()}
    sizes = {name: dict(label="" if labels == 1 else "LABEL_1", tp=tp) for name, (_, labels, tp) in cases.items()}
    groups = serve(
        **{
            name: ServedModelConfig(folder, "classifier", max_model_len=256, **sizes[name])
            for name, folder in folders.items()
        }
    )
    chats = draw_chats(40)
    for name, (head, labels, tp) in cases.items():
        expected = [logits[:, int(labels > 1)] for logits in score_by_transformers(folders[name], head, chats)]
        verdicts = answer(groups[name], chats)
        assert not any(verdict.error for verdict in verdicts)
        worst = max(abs(one.value - float(logits[-1])) for one, logits in zip(verdicts, expected, strict=True))
        if head == "Token":
            assert all(len(one.values) == len(logits) for one, logits in zip(verdicts, expected, strict=True))
            differences = [(torch.tensor(one.values) - logits).abs().max() for one, logits in zip(verdicts, expected)]
            worst = max(worst, *map(float, differences))
        measured({f"{head} classification, TP {tp}": worst})
        assert worst <= LIMIT
        assert max(float(logits.abs().max()) for logits in expected) > 0.3, "there is something to differ in"
        alone = [answer(groups[name], [chat])[0] for chat in chats[:4]]
        assert all(abs(one.value - other.value) <= LIMIT for one, other in zip(alone, verdicts))
        if name == "tokens":
            ray.kill(groups[name].workers[0])
            assert answer(groups[name], chats) == verdicts, "bit for bit"


def compare_by_transformers(folder: str, questions: list[str], options: dict[str, float]) -> list[float]:
    """The mean of the options' values, by their probabilities as the next token of each question."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [tokenizer.encode(option, add_special_tokens=False) for option in options]
    assert all(len(each) == 1 for each in ids)
    found = []
    for question in questions:
        with torch.no_grad():
            logits = model(torch.tensor([encode_question(tokenizer, question)])).logits[0, -1]
        chances = logits[[token for (token,) in ids]].softmax(0)
        found.append(float(chances @ torch.tensor([*map(float, options.values())])))
    return found


def read_whole(group, tokenizer, ids: list[int]) -> float | None:
    """Read the verdict of an answer, unless it was cut at its length."""
    return group.model.form.read_verdict(tokenizer.decode(ids[:-1])) if ids[-1] == tokenizer.eos_token_id else None


def encode_question(tokenizer, question: str) -> list[int]:
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.large
def test_verdicts_are_transformers_after_a_lost_engine_too(serve, chat_model, write_form, measured):
    """Of a choice by a rubric, and of a score that is sampled."""
    import ray
    from transformers import AutoModelForCausalLM

    groups = serve(**{name: ServedModelConfig(chat_model, template=write_form(name)) for name in FORMS})
    fields = [{"question": chat[0]["content"], "text": chat[1]["content"]} for chat in draw_chats(24)]

    def ask(criterion: str) -> list[str]:
        return [f"How good is {one['text']} to {one['question']}? {criterion}" for one in fields]

    verdicts = {name: answer(group, fields, 5) for name, group in groups.items()}
    options = {"A": 1.0, "B": 0.5, "C": 0.0}
    short, right = (compare_by_transformers(chat_model, ask(criterion), options) for criterion in ("short?", "right?"))
    expected = [(one + 3 * other) / 4 for one, other in zip(short, right, strict=True)]
    worst = max(abs(verdict.value - mean) for verdict, mean in zip(verdicts["choice"], expected, strict=True))
    measured({"choices": worst})
    assert worst <= LIMIT and max(expected) - min(expected) > 1e-3, "there is something to differ in"
    assert [verdict.values for verdict in verdicts["choice"]] == [
        pytest.approx(pair, abs=LIMIT) for pair in zip(short, right, strict=True)
    ]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32), make_tokenizer(CHAT)
    for question, verdict in zip(ask(""), verdicts["score"], strict=True):
        ids = torch.tensor([encode_question(tokenizer, question)])
        with torch.no_grad():
            sampled = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(sampled, skip_special_tokens=True)
        value = read_whole(groups["score"], tokenizer, sampled.tolist())
        if value is not None:  # else it was asked a second time
            assert (verdict.texts, verdict.value) == ((text,), value)
    ray.kill(groups["choice"].workers[0])
    assert answer(groups["choice"], fields, 5) == verdicts["choice"], "bit for bit"


@pytest.mark.product
def test_a_real_model_judges_as_by_transformers(serve, smollm2, tmp_path, measured):
    """SmolLM2 by the file of a recipe, on right and wrong solutions; and by a score that it writes."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from recipes.common.smoke import _QUESTIONS
    from recipes.served.judge_and_math import JUDGE

    prompt = "prompt = 'Question: {{ question }} Answer: {{ text }} Rate it from 0 to 10. Write the number alone.'\n"
    (tmp_path / "score.toml").write_text(f'verdict = "score"\nmax_tokens = 8\n{prompt}')
    templates = {"choice": JUDGE.template, "score": str(tmp_path / "score.toml")}
    groups = serve(
        **{name: ServedModelConfig(smollm2, template=file, max_model_len=512) for name, file in templates.items()}
    )
    rows = [json.loads(line) for line in Path(_QUESTIONS).read_text().splitlines()]
    fields = [
        {"question": row["question"], "answer": row["answer"], "text": text, "row": row}
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
        for text in (row["answer"], other["answer"])
    ]
    forms = {name: group.model.form for name, group in groups.items()}
    verdicts = {name: answer(group, fields) for name, group in groups.items()}
    options, worst = forms["choice"].options, 0.0
    for place, (criterion, _) in enumerate(forms["choice"].criteria):
        asked = [forms["choice"].render(each, criterion)[0]["content"] for each in fields]
        expected = compare_by_transformers(smollm2, asked, options)
        found = [verdict.values[place] for verdict in verdicts["choice"]]
        worst = max(worst, *(abs(one - other) for one, other in zip(found, expected, strict=True)))
        assert [value > 0.5 for value in found] == [value > 0.5 for value in expected]
    measured({"choices of SmolLM2": worst})
    assert worst <= LIMIT
    model, tokenizer = (kind.from_pretrained(smollm2) for kind in (AutoModelForCausalLM, PreTrainedTokenizerFast))
    for each, verdict in zip(fields, verdicts["score"], strict=True):
        ids = torch.tensor([encode_question(tokenizer, forms["score"].render(each, "")[0]["content"])])
        with torch.no_grad():
            sampled = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(sampled, skip_special_tokens=True)
        value = read_whole(groups["score"], tokenizer, sampled.tolist())
        if value is not None:  # else it was asked a second time
            assert (verdict.texts, verdict.value) == ((text,), value)


# -- runs


def digits(text, row):
    return sum(letter.isdigit() for letter in text) / 4


@pytest.fixture(scope="module")
def config(chat_model, make_classifier, write_form, tmp_path_factory, by_value):
    folder = make_data(tmp_path_factory.mktemp("data"))
    path = folder / "train.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
    reward = ServedModelConfig(make_classifier("Sequence", 1), "classifier", max_model_len=128, weight=0.1)
    judge = ServedModelConfig(chat_model, template=write_form("choice"), max_model_len=128, engines=2)
    return RunConfig(
        model=chat_model,
        data=DataConfig(str(path), max_prompt_tokens=8),
        actor=MegatronConfig(ranks=1, optimizer=OptimizerConfig(lr=3e-3, adam_eps=1e-5)),
        rollout=ROLLOUT,
        environment=EnvironmentConfig(workers=2, time_limit_s=20.0),
        models={"reward": reward, "judge": judge},
        recovery=RecoveryConfig(restarts=3),
        steps=3,
        prompts_per_step=4,
        samples_per_prompt=4,
    )


def run(config: RunConfig, folder: Path, disturb: Mapping[int, Callable] = MappingProxyType({})) -> list[dict]:
    """Run to the end, with disturbances behind steps; metrics without those that are seconds."""
    from rlworker.trainers.rl import Trainer

    environment = combine_parts({"digits": digits}, config.models)
    with Trainer(replace(config, run_dir=str(folder)), environment) as trainer:
        step = trainer.step

        def step_after():
            disturb.get(trainer.steps_done, lambda trainer: None)(trainer)
            return step()

        trainer.step = step_after
        trainer.fit()
    return read_metrics_without_times(folder)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return run(config, folder), folder


@pytest.mark.large
def test_a_run_learns_from_its_parts(finished):
    lines, folder = finished
    for line in lines[1:]:
        mean = line["reward_digits_mean"] + 0.1 * line["reward_reward_mean"] + line["reward_judge_mean"]
        assert line["reward"] == pytest.approx(mean, abs=1e-6) and line["reward_std"] > 0
        assert line["verdicts_judge"] == line["verdicts_reward"] == 1 and line["unreadable_judge"] == 0
        assert line["episode_failures"] == 0
    sample = json.loads(name_samples(folder, 3).read_text().splitlines()[0])
    assert sample["parts"].keys() == {"digits", "reward", "judge"}
    assert {(one["model"], bool(one["text"])) for one in sample["verdicts"]} == {("reward", False), ("judge", True)}


def find_group(trainer, name: str):
    return next(each for each in trainer.processes if getattr(each, "title", "") == f"{name} engine")


def kill_engines(trainer) -> None:
    import ray

    for name in ("judge", "reward"):
        ray.kill(find_group(trainer, name).workers[-1])


def kill_environment(trainer) -> None:
    """End an environment process once the verdicts of its episodes are there."""
    import ray

    pool = next(each for each in trainer.processes if hasattr(each, "limit_stalls"))
    questions = trainer.manager.loop.questions
    collect = questions.collect

    def kill_after(is_idle: bool) -> list:
        if found := collect(is_idle):
            questions.collect = collect
            ray.kill(pool.workers[0])
        return found

    questions.collect = kill_after


@pytest.mark.large
def test_a_disturbed_run_has_the_undisturbed_runs_metrics(finished, config, tmp_path):
    lines = run(config, tmp_path / "run", {1: kill_engines, 2: kill_environment})
    without = [{name: value for name, value in line.items() if name != "restarts"} for line in lines]
    assert without == [{name: value for name, value in line.items() if name != "restarts"} for line in finished[0]]
    lost = [json.loads(text)["lost"] for text in (tmp_path / "run" / "outages.jsonl").read_text().splitlines()]
    assert {name for each in lost for name in each} > {"judge engine 1", "reward engine 0"}


@pytest.mark.product
def test_a_colocated_run_and_one_ahead_ask_as_well(finished, config, tmp_path):
    judge = replace(config.models["judge"], engines=1)
    config = replace(config, models=config.models | {"judge": judge})
    actor, placement = replace(config.actor, ranks=2), replace(config.placement, colocate=True)
    names = ("reward_digits_mean", "reward_reward_mean", "reward_judge_mean")
    first = run(replace(config, actor=actor, placement=placement, steps=1), tmp_path / "colocated")[1]
    assert [first[name] for name in names] == pytest.approx([finished[0][1][name] for name in names], abs=1e-6)
    ahead = run(replace(config, rollout=replace(config.rollout, staleness=1), steps=2), tmp_path / "ahead")
    assert all(line["verdicts_judge"] == 1 and line["episode_failures"] == 0 for line in ahead[1:])


@pytest.mark.large
def test_a_run_goes_on_with_the_same_models_alone(finished, config, make_classifier, write_form, tmp_path):
    from engines.models.hub import find_model
    from rlworker.rollouts.scoring import check_served
    from rlworker.tracking.inputs import Inputs

    moved = tmp_path / "moved"
    moved.mkdir()
    for path in Path(config.models["reward"].model).iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    same = {"reward": replace(config.models["reward"], model=str(moved))}
    other = {"reward": replace(config.models["reward"], model=make_classifier("Sequence", 4), label="LABEL_0")}
    judge = {"judge": replace(config.models["judge"], template=write_form("score"))}
    for models, named in ((same, ""), (other, "models.reward.model"), (judge, "models.judge.template")):
        served = check_served(replace(config, models=config.models | models), find_model)
        held = Inputs(finished[1])
        if not named:
            held.hold(config.data, served=served)
            continue
        with pytest.raises(ValueError, match=named):
            held.hold(config.data, served=served)
