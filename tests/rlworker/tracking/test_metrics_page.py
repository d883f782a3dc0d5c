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
from engines.config import MegatronConfig, ServedModelConfig, VllmConfig
from rlworker.algorithms.losses import kl_k3, policy_loss, truncated_importance
from rlworker.algorithms.objective import make_objective
from rlworker.config.algorithm import AlgorithmConfig, DistillConfig
from rlworker.config.run import CriticConfig, CurriculumConfig, RunConfig
from rlworker.config.sft import SftConfig
from rlworker.config.validation import ValidationConfig
from rlworker.data.examples import Example
from rlworker.data.rows import Row
from rlworker.environments.record import CONTEXT, FailureKind, Segment, Trajectory, Verdict
from rlworker.rollouts.curriculum import Curriculum
from rlworker.tracking.log import RunLog
from rlworker.tracking.run_folder import RunFolder, Score
from rlworker.tracking.trackers import TrackedRun, Trackers
from rlworker.trainers.stop import Stop

ROOT = Path(__file__).parents[3]
LOGPROB, TOP = -1.0, 2
IMAGE_TOKEN = 9
VISION = SimpleNamespace(
    image_token=IMAGE_TOKEN, feature_tokens=[IMAGE_TOKEN], merge=1, axes=(0,), tower=SimpleNamespace(margin=False)
)
"""What of a vision tower's shape a batch is made with."""
CODEC = SimpleNamespace(
    stop_token_ids=(0,),
    decode_all=lambda samples, *_, **__: ["2"] * len(samples),
    read_samples=lambda samples: ["2"] * len(samples),
)


class Group:
    """An engine whose outputs are constants; losses and all that is made of them are the real ones."""

    dp_size = 1

    def __init__(self, name: str):
        self.name, self.role = name, SimpleNamespace(config=MegatronConfig())

    def forward(self, batch: TrainBatch, raw: bool = False):
        constant = torch.full((batch.num_tokens,), LOGPROB)
        if self.name == "critic":
            return ValueOutputs(0 * constant)
        top = None if batch.rollout_top_ids is None else constant[:, None].expand(-1, TOP + 1)
        return TokenOutputs(constant, -constant, top)

    def train_step(self, batch: TrainBatch, loss, denominator: float):
        outputs = self.forward(batch)
        _, metrics = loss(outputs, batch)
        metrics = {k: float(v) for k, v in metrics.items()}
        routing = {"expert_load_min": 0.5, "expert_load_max": 2.0, "router_aux_loss": 2.0, "router_z_loss": 1.0}
        return metrics | routing | {"grad_norm": 1.0, "lr": 1e-3, "prompt_sharing": 1.0}, outputs

    def call(self, *_):
        return []

    def sync_weights(self, *_):
        return {}


class Loop:
    """A loop, and its one engine, which answers every prompt with the same two tokens, ``turns`` times in an episode.

    Rewards are all alike or not, and stand at the first turn. Episodes fail in every way in turn: of several turns in
    one half of the ways, of one in the other.
    """

    environment_seconds, workers, questions = 0.0, (None,), SimpleNamespace(seconds=0.0)

    def __init__(self, trainer, alike: bool, turns: int):
        self.trainer, self.alike, self.turns = trainer, alike, turns
        kinds = get_args(FailureKind)
        self.kinds = [cycle([None, *(kinds[:5] if turns > 1 else kinds[5:])]) for _ in range(2)]

    def check_version(self, version):
        assert version == self.trainer.version

    def begin(self, rows, sampling, goes_first=False):
        return rows, sampling

    def wait(self, batch):
        rows, sampling = batch
        return [[self.run_episode(row, place, sampling) for place in range(sampling.count)] for row in rows]

    def run_episode(self, row: Row, place: int, sampling) -> Trajectory:
        segments = [Segment(row.prompt_ids, images=row.images)]
        for turn, completion in enumerate(self.sample(sampling, self.turns)):
            segments += [Segment((4,), CONTEXT)] if turn else []
            segments.append(Segment(completion.token_ids, turn, (), completion))
        failure = (kind, "") if (kind := next(self.kinds[sampling.temperature != 1.0])) else None
        reward = 0.0 if self.alike else float(place % 2)
        served = (
            {"parts": (("judge", 1.0),), "verdicts": (("judge", Verdict(1.0)),)} if self.trainer.config.models else {}
        )
        return Trajectory(row, (tuple(segments),), ((0, reward),), failure, answer="2", **served)

    def sample(self, sampling, count: int):
        logprobs = [] if sampling.temperature == 0 else [LOGPROB] * 2
        completions = make_completions(*[([3, 0], logprobs, self.trainer.version)] * count)
        if sampling.temperature == 0 or not sampling.top_logprobs:
            return completions
        ids = np.tile(np.arange(TOP, dtype=np.int32), (2, 1))
        top = {"top_ids": ids, "top_logprobs": np.full(ids.shape, 2 * LOGPROB, np.float32)}
        return [replace(completion, **top) for completion in completions]

    def call(self, method, *_):
        return [{"measure_load": (1.0, 2), "digest_weights": {}}.get(method.__name__, self.trainer.version)]

    def sample_each(self, rows, sampling):
        return self.sample(sampling, len(rows))


def rows_with_an_image() -> list[Row]:
    image = Image("a.png", "0", (1, 1), (1, 1, 1), "row 1")
    return [Row("1+1=", (1, 2), "2", {"level": 0}), Row("<image>", (1, IMAGE_TOKEN), "2", {"level": 1}, (image,))]


def start_nothing() -> list:
    """The processes of a run, of which there are none."""
    from rlworker.cluster.rollout_group import Rollouts
    from rlworker.cluster.train_group import StartingGroup

    processes = [kind.__new__(kind) for kind in (StartingGroup, Rollouts)]
    for group in processes:
        group.workers = []
    return processes


def name_generally(name: str) -> str:
    """Name a metric as the page does: of any part of the prompts or the reward, any held-out set, any samples."""
    name = re.sub("^(reward|verdicts|unreadable)_judge", r"\1_NAME", name)
    name = re.sub("^curriculum/[^/]+/", "curriculum/PART/", re.sub("^heldout/hard", "heldout", name))
    return re.sub(r"(pass|maj)_at_\d+$", r"\1_at_k", re.sub(r"mean_at_\d+$", "mean_at_n", name))


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
    return {name_generally(name) for line in lines for name in json.loads(line)}


def rl_fields(folder: Path, *, alike: bool = False, turns: int = 1, loss=None, advantage=None, **settings) -> set[str]:
    from rlworker.rollouts.manager import RolloutManager
    from rlworker.trainers.agreement import SyncedWeights
    from rlworker.trainers.rl import Trainer
    from rlworker.trainers.shared_devices import SharedDevices

    config = RunConfig(run_dir=str(folder), steps=2, prompts_per_step=2, samples_per_prompt=2, **settings)
    trainer = Trainer.__new__(Trainer)
    trainer.actor, trainer.references, trainer.critic = Group("actor"), {"reference": Group("reference").forward}, None
    if config.critic.train:
        trainer.critic = Group("critic")
    model = SimpleNamespace(vision=VISION, banned_tokens=(IMAGE_TOKEN,), count_training_flops=lambda *_: 1e6)
    trainer.models = {"actor": model, "critic": model}
    trainer.synced = SyncedWeights("float32")
    trainer.rows = rows_with_an_image() * 8
    trainer.heldout, trainer.score = {"": trainer.rows, "hard": trainer.rows}, Score("heldout", +1)
    trainer.objective = make_objective(config, advantage, loss)
    trainer.version = trainer.empty_steps = 0
    trainer.devices = SharedDevices()
    trainer.processes, trainer.rollouts = start_nothing(), (loop := Loop(trainer, alike, turns))
    trainer.start_seconds = {"time_start_trainers": 1.0, "time_start_rollouts": 1.0, "time_floor": 1.0}
    parts = CODEC, trainer.rows, trainer.rollouts, loop, trainer._phase, lambda text: None
    sizes = [len(trainer.rows) // 2] * 2
    curriculum = Curriculum(config, trainer.rows, sizes) if config.curriculum.sources else None
    trainer.manager = RolloutManager(config, *parts, curriculum)
    return written(trainer, config, folder)


def supervised_fields(folder: Path) -> set[str]:
    from rlworker.trainers.sft import SftTrainer

    trainer = SftTrainer.__new__(SftTrainer)
    trainer.train = [Example((1, 2, 3, 0), 2)]
    trainer.heldout, trainer.score = {"": trainer.train}, Score("heldout_loss", -1)
    trainer.model = SimpleNamespace(vision=None, count_training_flops=lambda *_: 1e6)
    trainer.group, trainer.processes = Group("actor"), start_nothing()
    trainer.start_seconds = {"time_start_trainers": 1.0}
    return written(trainer, SftConfig(run_dir=str(folder), steps=1, rows_per_step=1), folder)


@pytest.fixture
def fields(tmp_path, monkeypatch) -> set[str]:
    monkeypatch.setattr("rlworker.trainers.step_metrics.wait_for", list)  # of no calls: there are no processes
    correcting = partial(policy_loss, kl_coef=0.1, kl=kl_k3, correction=truncated_importance)
    algorithm = AlgorithmConfig(kl_coef=0.1, mini_batches=2, epochs=2, greedy_baseline=True)
    in_reward = replace(algorithm, kl_in="reward")
    critic = CriticConfig(train=True, clip=0.5, warmup_steps=1)
    centering = AlgorithmConfig(score_centering=TOP, mini_batches=2)
    distilling = AlgorithmConfig(name="distill", reference="TEACHER")
    sampled = ValidationConfig(samples=2, temperature=0.7)
    approximate = VllmConfig(attention_override=("vllm_cpu/images",))
    buckets = dict(difficulty_field="level", buckets={0: 1.0, 1: 1.0}, advance_at=0.5)
    curriculum = CurriculumConfig({"a.jsonl": 1.0, "b.jsonl": 1.0}, **buckets, pass_rates=(0.1, 0.9))
    return (
        rl_fields(tmp_path / "grpo", algorithm=algorithm, loss=correcting, rollout=approximate, validation=sampled)
        | rl_fields(tmp_path / "ppo", algorithm=in_reward, critic=critic)
        | rl_fields(tmp_path / "turns", turns=2)
        | rl_fields(tmp_path / "judged", models={"judge": ServedModelConfig("FOLDER", template="FILE")})
        | rl_fields(tmp_path / "centered", algorithm=centering)
        | rl_fields(tmp_path / "distilled", algorithm=distilling, distill=DistillConfig(top_k=TOP))
        | rl_fields(tmp_path / "curriculum", curriculum=curriculum)
        | rl_fields(tmp_path / "ahead", rollout=VllmConfig(staleness=1))
        | rl_fields(tmp_path / "empty", algorithm=AlgorithmConfig(dynamic_sampling=1), alike=True)
        | supervised_fields(tmp_path / "sft")
    )


def on_the_page() -> list[str]:
    rows = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    assert all(line.count("|") == 6 for line in rows), "field, unit, formula, healthy, when it is not"
    return [name for row in rows for name in re.findall(r"`([\w/]+)`", row.split("|")[1])]


def test_the_page_names_every_field_once_and_no_other(fields):
    named = on_the_page()
    assert set(named) == fields
    assert len(named) == len(fields), "a field has two lines"


MADE_IN = (
    "algorithms/distillation.py",
    "algorithms/losses.py",
    "cluster/train_group.py",
    "rollouts/curriculum.py",
    "rollouts/metrics.py",
    "rollouts/manager.py",
    "tracking/log.py",
    "trainers/agreement.py",
    "trainers/rl.py",
    "trainers/run.py",
    "trainers/sft.py",
    "trainers/step_metrics.py",
    "validation/validate.py",
)
"""Where metrics are made."""
OTHER_KEYS = {"prompt", "completion", "answer", "images", "actor", "reference", "critic", "rollouts", "folder"}
OTHER_KEYS |= {"first_rollout", "rows", "by", "text", "learns", "outcome", "fork", "turns", "aggregation", "advantage"}
OTHER_KEYS |= {"curriculum", "rates", "passed_over", "open_buckets", "window", "source_credits", "bucket_credits"}
OTHER_KEYS |= {"parts", "value", "verdicts", "model"}
OTHER_KEYS |= {"queues", "picks", "center", "surrogate", "prompts", "table", "set", "source", "greedy"}
OTHER_KEYS |= {"time_save", "time_restart", "time_restore"}
"""Keys there that are none: samples, turns, arguments, roles and states; and phases whose time nothing keeps."""


def keys_in(tree: ast.AST) -> set[str]:
    """Keys of dicts that are written out, or set one by one, and the phases of a step as ``time_`` fields."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("phase", "_phase"):
            found |= {f"time_{name.value}" for name in node.args if isinstance(name, ast.Constant)}
    return found


@pytest.mark.parametrize("file", MADE_IN)
def test_no_branch_writes_a_field_that_the_page_lacks(file):
    """The runs above may not come to every branch; what it would write is a key in its source all the same."""
    keys = keys_in(ast.parse((ROOT / "rlworker" / file).read_text()))
    assert keys - OTHER_KEYS <= {*on_the_page()}
