"""Classifiers and judges on real engines against transformers: batched, cut over two devices, after a lost engine; and
runs that ask them."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from kill_chain import read_metrics_without_times

from engines.config import MegatronConfig, OptimizerConfig, ServedModelConfig, VllmConfig
from recipes.common.addition import make_data, make_tokenizer
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig, EnvironmentConfig, RecoveryConfig
from rlworker.environments import combine_parts
from rlworker.tracking.log import name_samples

pytestmark = [pytest.mark.large, pytest.mark.timeout(600), pytest.mark.usefixtures("cluster")]
LIMIT = 1e-5
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
FORMS = {
    "choice": 'verdict = "choice"\noptions = {A = 1, B = 0.5, C = 0}\n',
    "score": 'verdict = "score"\nrange = [0, 9]\nmax_tokens = 8\n',
    "rubric": 'verdict = "choice"\noptions = {Y = 1, N = 0}\nrubric = {"short?" = 1, "right?" = 3}\n',
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
    from rlworker.rollouts.scoring.group import check_served, start_groups

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


@pytest.mark.parametrize(("head", "labels", "tp"), [("Sequence", 1, 1), ("Sequence", 3, 2), ("Token", 2, 1)])
def test_scores_are_transformers_logits_after_a_lost_engine_too(serve, make_classifier, measured, head, labels, tp):
    import ray

    folder, chats = make_classifier(head, labels), draw_chats(40)
    label = "" if labels == 1 else "LABEL_1"
    group = serve(reward=ServedModelConfig(folder, "classifier", label=label, tp=tp, max_model_len=256))["reward"]
    expected = [logits[:, bool(label) * 1] for logits in score_by_transformers(folder, head, chats)]
    verdicts = answer(group, chats)
    assert not any(verdict.error for verdict in verdicts)
    worst = max(abs(one.value - float(logits[-1])) for one, logits in zip(verdicts, expected, strict=True))
    if head == "Token":
        assert all(len(one.values) == len(logits) for one, logits in zip(verdicts, expected, strict=True))
        differences = [(torch.tensor(one.values) - logits).abs().max() for one, logits in zip(verdicts, expected)]
        worst = max(worst, *map(float, differences))
    measured({f"{head} classification, TP {tp}": worst})
    assert worst <= LIMIT
    assert max(float(logits.abs().max()) for logits in expected) > 0.3, "there is something to differ in"
    alone = [answer(group, [chat])[0] for chat in chats[:4]]
    assert all(abs(one.value - other.value) <= LIMIT for one, other in zip(alone, verdicts))
    ray.kill(group.workers[0])
    assert answer(group, chats) == verdicts, "bit for bit"


@pytest.mark.parametrize("tp", [1, 2], ids=["TP1", "TP2"])
def test_verdicts_are_transformers_after_a_lost_engine_too(serve, chat_model, write_form, measured, tp):
    import ray
    from transformers import AutoModelForCausalLM

    names = ("choice", "rubric", "score")
    groups = serve(**{name: ServedModelConfig(chat_model, template=write_form(name), tp=tp) for name in names})
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32), make_tokenizer(CHAT)
    fields = [{"question": chat[0]["content"], "text": chat[1]["content"]} for chat in draw_chats(24)]

    def encode(one: dict, criterion: str) -> list[int]:
        prompt = f"How good is {one['text']} to {one['question']}? {criterion}"
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def compare(one: dict, criterion: str, options: dict[str, float]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([encode(one, criterion)])).logits[0, -1]
        chances = logits[[tokenizer.convert_tokens_to_ids(text) for text in options]].softmax(0)
        return float(chances @ torch.tensor([*options.values()]))

    verdicts = {name: answer(group, fields, 5) for name, group in groups.items()}
    worst = 0.0
    for one, choice, rubric in zip(fields, verdicts["choice"], verdicts["rubric"], strict=True):
        worst = max(worst, abs(choice.value - compare(one, "", {"A": 1.0, "B": 0.5, "C": 0.0})))
        found = [compare(one, criterion, {"Y": 1.0, "N": 0.0}) for criterion in ("short?", "right?")]
        worst = max(worst, abs(rubric.value - (found[0] + 3 * found[1]) / 4))
        assert len(rubric.texts) == 2
    measured({f"choices, TP {tp}": worst})
    assert worst <= LIMIT
    for one, verdict in zip(fields, verdicts["score"], strict=True):
        ids = torch.tensor([encode(one, "")])
        with torch.no_grad():
            sampled = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(sampled, skip_special_tokens=True)
        if not verdict.error and any(letter.isdigit() for letter in text):  # else it was asked a second time
            assert verdict.texts == (text,)
    for group in groups.values():
        ray.kill(group.workers[0])
    assert {name: answer(group, fields, 5) for name, group in groups.items()} == verdicts, "bit for bit"


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


def run(config: RunConfig, folder: Path, disturb=lambda trainer: None) -> list[dict]:
    """Run to the end, with a disturbance before the second step; metrics without those that are seconds."""
    from rlworker.trainers.rl import Trainer

    environment = combine_parts({"digits": digits}, config.models)
    with Trainer(replace(config, run_dir=str(folder)), environment) as trainer:
        step = trainer.step

        def step_after():
            if trainer.steps_done == 1:
                disturb(trainer)
            return step()

        trainer.step = step_after
        trainer.fit()
    return read_metrics_without_times(folder)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return run(config, folder), folder


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


@pytest.mark.parametrize("disturb", [kill_engines, kill_environment])
def test_a_disturbed_run_has_the_undisturbed_runs_metrics(finished, config, tmp_path, disturb):
    lines = run(config, tmp_path / "run", disturb)
    without = [{name: value for name, value in line.items() if name != "restarts"} for line in lines]
    assert without == [{name: value for name, value in line.items() if name != "restarts"} for line in finished[0]]
    if disturb is kill_engines:
        lost = [json.loads(text)["lost"] for text in (tmp_path / "run" / "outages.jsonl").read_text().splitlines()]
        assert {name for each in lost for name in each} == {"judge engine 1", "reward engine 0"}


def test_a_colocated_run_and_one_ahead_ask_as_well(finished, config, tmp_path):
    colocated = replace(
        config, actor=replace(config.actor, ranks=2), placement=replace(config.placement, colocate=True)
    )
    names = ("reward_digits_mean", "reward_reward_mean", "reward_judge_mean")
    first = run(colocated, tmp_path / "colocated")[1]
    assert [first[name] for name in names] == pytest.approx([finished[0][1][name] for name in names], abs=1e-6)
    ahead = run(replace(config, rollout=replace(config.rollout, staleness=1)), tmp_path / "ahead")
    assert all(line["verdicts_judge"] == 1 and line["episode_failures"] == 0 for line in ahead[1:])


def test_a_run_goes_on_with_the_same_models_alone(finished, config, make_classifier, write_form, tmp_path):
    from engines.models.hub import find_model
    from rlworker.rollouts.scoring.group import check_served
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
