"""docs/metrics.md names every field of metrics.jsonl: the trainers' own steps write them here, around fake engines."""

import ast
import json
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from support.rollout_workers import make_completions

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.batch.shard import TokenOutputs, ValueOutputs
from engines.config import VllmConfig
from engines.interfaces import StepResult
from rlworker.algorithms.advantages import gae, grpo
from rlworker.algorithms.losses import (
    configure_loss,
    kl_k3,
    policy_loss,
    token_mean,
    truncated_importance,
    value_loss,
)
from rlworker.config.run import AlgorithmConfig, CriticConfig, RunConfig
from rlworker.config.sft import SftConfig
from rlworker.data.examples import Example
from rlworker.data.rows import Row
from rlworker.tracking.log import RunLog
from rlworker.tracking.run_folder import RunFolder
from rlworker.tracking.trackers import TrackedRun, Trackers
from rlworker.trainers.stop import Stop

ROOT = Path(__file__).parents[3]
LOGPROB, TOP = -1.0, 2
IMAGE_TOKEN = 9
VISION = SimpleNamespace(
    image_token=IMAGE_TOKEN, feature_tokens=[IMAGE_TOKEN], merge=1, axes=(0,), tower=SimpleNamespace(margin=False)
)
"""What of a vision tower's shape a batch is made with."""
TOKENIZER = SimpleNamespace(eos_token_id=0, batch_decode=lambda ids, **_: ["2"] * len(ids))


class Group:
    """An engine whose outputs are constants; losses and all that is made of them are the real ones."""

    dp_size = 1
    prompt_sharing = 1.0

    def __init__(self, name: str):
        self.name = name

    def forward(self, batch: TrainBatch, raw: bool = False):
        constant = torch.full((batch.num_tokens,), LOGPROB)
        if self.name == "critic":
            return ValueOutputs(0 * constant)
        top = None if batch.rollout_top_ids is None else constant[:, None].expand(-1, TOP + 1)
        return TokenOutputs(constant, -constant, top)

    def train_step(self, batch: TrainBatch, loss, denominator: float):
        outputs = self.forward(batch)
        _, metrics = loss(outputs, batch)
        return [StepResult({k: float(v) for k, v in metrics.items()}, outputs, 1.0, 1e-3)], outputs

    def call(self, *_):
        return []


class Rollouts:
    """One rollout engine that answers every prompt with the same two tokens."""

    workers = (None,)

    def __init__(self, trainer):
        self.trainer = trainer

    def generate(self, rows, sampling):
        logprobs = [] if sampling.temperature == 0 else [LOGPROB] * 2
        completions = make_completions(*[([3, 0], logprobs, self.trainer.version)] * (sampling.count * len(rows)))
        if sampling.temperature == 0 or not sampling.top_logprobs:
            return completions
        ids = np.tile(np.arange(TOP, dtype=np.int32), (len(completions.token_ids), 1))
        return replace(completions, top_ids=ids, top_logprobs=np.full(ids.shape, 2 * LOGPROB, np.float32))

    def call(self, method, *_):
        return [{"measure_load": (1.0, 2), "digest_weights": {}}.get(method, self.trainer.version)]


class Ahead:
    """A stream that draws when it is waited for."""

    def __init__(self, rollouts, rewards):
        self.rollouts, self.rewards = rollouts, rewards

    def begin(self, rows, sampling, goes_first=False):
        return rows, sampling

    def wait(self, draw):
        from rlworker.rollouts.scoring import score_completions

        return score_completions(TOKENIZER, self.rewards, draw[0], self.rollouts.generate(*draw))

    def sample_each(self, rows, sampling):
        return self.rollouts.generate(rows, sampling)


class Rewards:
    """Rewards that are all alike or not, and failures of every kind."""

    def __init__(self, alike: bool):
        self.alike = alike

    def score(self, texts, rows):
        from rlworker.rewards.pool import Scores
        from rlworker.rewards.worker import FailureKind

        values = [0.0 if self.alike else float(i % 2) for i in range(len(texts))]
        return Scores(values, dict.fromkeys(get_args(FailureKind), 1), [])


def make_player(trainer):
    """Make a player whose episodes have two turns, of which the second has no reward, and fail in every way in turn."""
    from rlworker.episodes.record import CONTEXT, EpisodeRecord, FailureKind, Piece
    from rlworker.rollouts.plays import EpisodeGroup, Player

    kinds = cycle([None, *get_args(FailureKind)])

    def play_one(row: Row, reward: float, logprobs: list[float]) -> EpisodeRecord:
        said = list(make_completions(*[([3, 0], logprobs, trainer.version)] * 2))
        prompt, answer = Piece(row.prompt_ids, images=row.images), Piece((4,), CONTEXT)
        pieces = (prompt, Piece(said[0].token_ids, 0, (), said[0]), answer, Piece(said[1].token_ids, 1, (), said[1]))
        failure = (kind, "") if (kind := next(kinds)) else None
        return EpisodeRecord(row, (pieces,), ((0, reward),), failure)

    class Plays(Player):
        def play(self, rows, sampling):
            logprobs = [] if sampling.temperature == 0 else [LOGPROB] * 2
            groups = [[play_one(row, float(i), logprobs) for i in range(sampling.count)] for row in rows]
            return [EpisodeGroup.collect(row, episodes) for row, episodes in zip(rows, groups, strict=True)]

    codec = SimpleNamespace(decode_all=lambda ids, **_: ["2"] * len(ids))
    return Plays(codec, None, trainer.rollouts)


def rows_with_an_image() -> list[Row]:
    image = Image("a.png", "0", (1, 1), (1, 1, 1), "row 1")
    return [Row("1+1=", (1, 2), "2", {}), Row("<image>", (1, IMAGE_TOKEN), "2", {}, (image,))]


def written(trainer, config, folder: Path) -> set[str]:
    """Run a trainer whose engines are in place to its last step: the fields of what it wrote."""
    from rlworker.trainers.outages import Outages

    trainer.config, trainer.folder = config, RunFolder(folder)
    trainer.running, trainer.stop_request = ExitStack(), Stop()
    trainer.steps_done, trainer._best, trainer._saved_step, trainer._saved_at = 0, None, 0, 0.0
    trainer.outages = Outages(1, folder)
    trainer.skipped = {"skipped_train": 0, "skipped_heldout": 0}
    folder.mkdir()
    trainer.outages.note("step 1, phase rollout", {"rollout engine 0": "died"})
    with RunLog(folder, config.steps, 0, Trackers([], TrackedRun(folder, 0, {})), trainer.line) as trainer.log:
        trainer._steps()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return set().union(*map(json.loads, lines))


def rl_fields(
    folder: Path, *, alike: bool = False, plays: bool = False, loss=None, advantage=grpo, **settings
) -> set[str]:
    """The fields that two steps of RL write."""
    from rlworker.rollouts.sampler import Sampler
    from rlworker.trainers.agreement import SyncedWeights
    from rlworker.trainers.rl import Trainer
    from rlworker.trainers.shared_devices import SharedDevices

    config = RunConfig(run_dir=str(folder), steps=2, prompts_per_step=2, samples_per_prompt=2, **settings)
    trainer = Trainer.__new__(Trainer)
    trainer.actor, trainer.reference, trainer.critic = Group("actor"), Group("reference"), None
    if config.critic.train:
        trainer.critic = Group("critic")
    trainer.models = {"actor": SimpleNamespace(vision=VISION, banned_tokens=(IMAGE_TOKEN,))}
    trainer.synced = SyncedWeights("float32")
    trainer.rows = trainer.heldout = rows_with_an_image() * (4 if plays else 1)
    trainer.advantage, trainer.aggregation = advantage, token_mean
    trainer.loss = loss or configure_loss(config.algorithm, config.truncates_importance)
    trainer.value_loss = partial(value_loss, clip=config.critic.clip)
    trainer.kl_in_reward = config.algorithm.kl_coef if config.algorithm.kl_in == "reward" else 0.0
    trainer.version = trainer.empty_steps = 0
    trainer.devices = SharedDevices()
    trainer.processes, trainer.rollouts = [], Rollouts(trainer)
    trainer.start_seconds = {"time_start_trainers": 1.0, "time_start_rollouts": 1.0, "time_floor": 1.0}
    parts = (
        TOKENIZER,
        (TOKENIZER.eos_token_id,),
        trainer.rows,
        trainer.rollouts,
        make_player(trainer) if plays else Rewards(alike),
        trainer._phase,
        lambda text: None,
    )
    ahead = Ahead(trainer.rollouts, parts[4]) if config.rollout.staleness else None
    trainer.sampler = Sampler(config, *parts, ahead)
    return written(trainer, config, folder)


def supervised_fields(folder: Path) -> set[str]:
    """The fields that a supervised step writes."""
    from rlworker.trainers.sft import SftTrainer

    trainer = SftTrainer.__new__(SftTrainer)
    trainer.train = trainer.heldout = [Example((1, 2, 3, 0), 2)]
    trainer.model, trainer.group, trainer.processes = SimpleNamespace(vision=None), Group("actor"), []
    trainer.start_seconds = {"time_start_trainers": 1.0}
    return written(trainer, SftConfig(run_dir=str(folder), steps=1, rows_per_step=1), folder)


@pytest.fixture
def fields(tmp_path) -> set[str]:
    """Every field that runs of all kinds write."""
    correcting = partial(policy_loss, kl_coef=0.1, kl=kl_k3, correction=truncated_importance)
    algorithm = AlgorithmConfig(kl_coef=0.1, mini_batches=2, greedy_baseline=True)
    in_reward = replace(algorithm, kl_in="reward")
    critic = CriticConfig(train=True, clip=0.5, warmup_steps=1)
    centering = AlgorithmConfig(score_centering=TOP, mini_batches=2)
    approximate = VllmConfig(attention_override=("vllm_cpu/images",))
    return (
        rl_fields(tmp_path / "grpo", algorithm=algorithm, loss=correcting, rollout=approximate)
        | rl_fields(tmp_path / "ppo", algorithm=in_reward, critic=critic, advantage=gae)
        | rl_fields(tmp_path / "plays", plays=True)
        | rl_fields(tmp_path / "centered", algorithm=centering)
        | rl_fields(tmp_path / "ahead", rollout=VllmConfig(staleness=1))
        | rl_fields(tmp_path / "empty", algorithm=AlgorithmConfig(dynamic_sampling=1), alike=True)
        | supervised_fields(tmp_path / "sft")
    )


def on_the_page() -> list[str]:
    """The fields of the page's tables: names in code in the first cell of a row."""
    rows = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    assert all(line.count("|") == 6 for line in rows), "field, unit, formula, healthy, when it is not"
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_the_page_names_every_field_once_and_no_other(fields):
    named = on_the_page()
    assert set(named) == fields
    assert len(named) == len(fields), "a field has two lines"


MADE_IN = (
    "algorithms/losses.py",
    "rollouts/metrics.py",
    "rollouts/plays.py",
    "rollouts/sampler.py",
    "rollouts/to_batch.py",
    "tracking/log.py",
    "trainers/rl.py",
    "trainers/run.py",
    "trainers/sft.py",
    "trainers/step_metrics.py",
)
"""Where metrics are made."""
OTHER_KEYS = {"prompt", "completion", "answer", "images", "actor", "reference", "critic", "rollouts", "folder"}
OTHER_KEYS |= {"first_rollout", "rows", "by", "text", "learns", "outcome", "fork", "default", "note_lost", "seed"}
OTHER_KEYS |= {
    "aggregation",
    "advantage",
    "center",
    "surrogate",
    "prompts",
    "time_save",
    "time_restart",
    "time_restore",
}
"""Keys there that are none: samples, turns, arguments, roles and states; and phases whose time nothing keeps."""


def keys_in(tree: ast.AST) -> set[str]:
    """Keys of dicts that are written out, or set one by one, and the phases of a step as ``time_`` fields."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant)
        ):
            found.add(node.slice.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("phase", "_phase"):
            found |= {f"time_{name.value}" for name in node.args if isinstance(name, ast.Constant)}
    return found


@pytest.mark.parametrize("file", MADE_IN)
def test_no_branch_writes_a_field_that_the_page_lacks(file):
    """The runs above may not come to every branch; what it would write is a key in its source all the same."""
    keys = keys_in(ast.parse((ROOT / "rlworker" / file).read_text()))
    assert keys - OTHER_KEYS <= {*on_the_page()}
