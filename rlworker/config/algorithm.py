"""The algorithms by name, and the settings that choose one of them or its parts."""

import ast
import difflib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast

from annotated_types import Ge, Le

from engines.config import VllmConfig
from engines.validation import FINITE, LARGEST, check_numbers, check_types, option
from rlworker.config.sections import CriticConfig, LimitsConfig

TEACHER = "teacher "
"""Beginning of the role of a teacher; the source of its rows follows."""


def list_advantages() -> dict[str, set[str]]:
    """List the advantages that have a name, in their order: function of ``advantages`` -> its marks.

    The file is read as text: settings are checked before anything takes the time to import torch.
    """
    tree = ast.parse((Path(__file__).parents[1] / "algorithms" / "advantages.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marks = {function.name: {ast.unparse(mark) for mark in function.decorator_list} for function in functions}
    return {name: found for name, found in marks.items() if "named" in found}


_ADVANTAGES = list_advantages()
if TYPE_CHECKING:  # a checker of types wants the names of a Literal written out
    AdvantageName = str
else:
    AdvantageName = Literal[tuple(_ADVANTAGES)]
SurrogateName = Literal["ppo", "gspo", "cispo", "gmpo", "sapo"]
AggregationName = Literal["token_mean", "sequence_mean", "constant_length"]
KlName = Literal["k1", "k2", "k3"]
Importance = Literal[
    "none",
    "truncated",
    "masked",
    "rejected",
    "sequence_truncated",
    "sequence_masked",
    "sequence_rejected",
    "geometric_rejected",
]
Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Algorithm:
    """The parts of an algorithm. The defaults are those of a run whose settings name no algorithm.

    Attributes:
        advantage, surrogate, aggregation: names of functions in the modules ``advantages`` and ``losses``.
        clip_low, clip_high, dual_clip: parameters of the surrogate; None takes the default of its function, from its
            paper.
        kl_coef, kl_in, kl_estimate: the KL penalty; for kl_estimate None takes k3 in the loss and k1 in the reward.
        dynamic_sampling, overlong_buffer: as in ``AlgorithmConfig``.
    """

    advantage: AdvantageName = "grpo"
    surrogate: SurrogateName = "ppo"
    aggregation: AggregationName = "token_mean"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimate: KlName | None = None
    dynamic_sampling: int = 0
    overlong_buffer: float = 0.0


ALGORITHMS = MappingProxyType(
    {
        # DeepSeekMath, arXiv:2402.03300, equation 3 and section 4.2 (KL 0.04); section 4.1.3 for rewards of turns.
        "grpo": Algorithm(aggregation="sequence_mean", kl_coef=0.04),
        "turn_grpo": Algorithm("turn_grpo", aggregation="sequence_mean", kl_coef=0.04),
        # arXiv:2503.20783, section 3.2: neither a deviation nor a length divides.
        "dr_grpo": Algorithm("dr_grpo", aggregation="constant_length"),
        # arXiv:2503.14476, sections 3.1 to 3.4; the buffer is 4,096 of 20,480 tokens.
        "dapo": Algorithm(clip_high=0.28, dynamic_sampling=2, overlong_buffer=0.2),
        # arXiv:2507.18071, equation 5.
        "gspo": Algorithm(surrogate="gspo", aggregation="sequence_mean"),
        # MiniMax-M1, arXiv:2506.13585, equation 4.
        "cispo": Algorithm(surrogate="cispo"),
        # arXiv:2507.20673, equation 4.
        "gmpo": Algorithm(surrogate="gmpo", aggregation="sequence_mean"),
        # arXiv:2511.20347.
        "sapo": Algorithm(surrogate="sapo", aggregation="sequence_mean"),
        # arXiv:2402.14740: a completion is one action, so no length divides; KL 0.03 is that of its summaries.
        "rloo": Algorithm("rloo", aggregation="constant_length", kl_coef=0.03, kl_in="reward"),
        # arXiv:2501.03262.
        "reinforce_plus_plus": Algorithm("reinforce_plus_plus", kl_coef=0.01, kl_in="reward"),
        "reinforce_plus_plus_baseline": Algorithm("reinforce_plus_plus_baseline", kl_coef=0.01, kl_estimate="k2"),
        # arXiv:2310.10505; its KL is in the reward, with a weight of each experiment.
        "remax": Algorithm("remax", kl_in="reward"),
        # arXiv:1707.06347, with the KL of arXiv:2203.02155 in the reward, whose weight is the user's.
        "ppo": Algorithm("gae", kl_in="reward"),
        # Reverse KL to a teacher on the student's samples: arXiv:2306.08543, arXiv:2306.13649.
        "distill": Algorithm("distill"),
    }
)
"""Name of an algorithm -> its parts, as in its paper."""

_CLIPS = {"clip_low", "clip_high"}
_CLIPS_OF = {"ppo": {*_CLIPS, "dual_clip"}, "gspo": _CLIPS, "cispo": _CLIPS, "gmpo": _CLIPS, "sapo": set()}
"""Surrogate -> its clips; SAPO's gate has none."""
_SEQUENCE_RATIO = ("gspo", "gmpo")


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithm by its name, and each of its parts: what is learned from a rollout, and how often."""

    name: str = ""
    """Algorithm whose paper sets the parts that are None; docs/algorithms.md has them. Names: grpo, turn_grpo, dr_grpo,
    dapo, gspo, cispo, gmpo, sapo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, ppo, distill. Empty
    takes GRPO's advantage, PPO's clip, the mean over tokens and no KL."""
    advantage: AdvantageName | None = None
    """Advantage; gae trains a critic, remax samples greedy completions and distill needs a reference."""
    surrogate: SurrogateName | None = None
    """Loss of a token or sequence by its ratio."""
    aggregation: AggregationName | None = None
    """Weight of each token: all alike, by the mean of its episode, or divided by a constant."""
    clip_low: Annotated[float, Ge(0)] | None = None
    """The policy ratio is clipped at 1 - clip_low, in gmpo its logarithm at -clip_low. None takes the algorithm's: 0.2
    in PPO's surrogate."""
    clip_high: Annotated[float, Ge(0)] | None = None
    """The policy ratio is clipped at 1 + clip_high, in gmpo its logarithm at clip_high. None takes the algorithm's: 0.2
    in PPO's surrogate."""
    dual_clip: float | None = None
    """Dual-clip PPO (arXiv:1912.09729): a token with advantage A < 0 has a loss of at most dual_clip x |A|, which
    bounds the update where the ratio is large. 0 turns it off; other values must be above 1, such as 3."""
    kl_coef: Annotated[float, Ge(0), FINITE] | None = None
    """Weight of the KL penalty to the reference model; above 0 the run has a reference model."""
    kl_in: Literal["loss", "reward"] | None = None
    """Place of the KL penalty: in the loss, or in each token's reward."""
    kl_estimate: KlName | None = None
    """Estimate of the KL (Schulman 2020); None takes k3 in the loss and k1 in the reward."""
    reference: str = ""
    """HuggingFace folder or hf:ORG/NAME of the reference model, or of a teacher. It then runs with kl_coef 0 too.
    Empty takes the starting model."""
    importance: Literal["auto", Importance] = "auto"
    """Importance weight of each token's loss, the trainer's over the rollout's probability. It is truncated at a bound;
    masked, 0 outside of two bounds; or rejected, 1 within and 0 outside. For a sequence it is the product over its
    tokens, or their geometric mean. The default, auto, truncates in bfloat16 and where rollouts run ahead. A loss of a
    recipe gets it as correction."""
    importance_bounds: tuple[Annotated[float, Ge(0), FINITE], ...] = ()
    """Bounds of an importance weight: the upper one where truncated, else the lower and the upper one. Without any they
    are 2, 0.5 and 5 where masked, and 0.5 and 2 where rejected."""
    score_centering: Annotated[int, Ge(0)] = 0
    """Number of likeliest tokens by which score centering (arXiv:2609.20807) removes the rollout's mean drift from the
    gradient; 0 turns it off. A loss of a recipe calls center_scores."""
    entropy_coef: Annotated[float, Ge(0), FINITE] = 0.0
    """Weight of the entropy bonus."""
    mini_batches: Annotated[int, Ge(1)] = 1
    """Number of mini-batches, and so of optimizer steps, in an epoch over a rollout."""
    epochs: Annotated[int, Ge(1)] = 1
    """Number of times that a step learns from its rollout; limits.epoch_kl may end it before."""
    greedy_baseline: bool = False
    """Sample and reward a greedy completion of every prompt; the advantage remax does so without it."""
    dynamic_sampling: Annotated[int, Ge(0)] | None = None
    """Largest number of further rollouts in a step, which replace groups whose rewards teach nothing (DAPO); 0 turns it
    off."""
    overlong_buffer: Annotated[float, Ge(0), Le(1)] | None = None
    """Share of an episode's longest text, at its end, over which the reward falls by up to 1 (DAPO); 0 turns it off.
    That is rollout.max_new_tokens of each of its turns, within environment.tokens."""

    def __post_init__(self):
        check_types("algorithm", self)
        if self.name and self.name not in ALGORITHMS:
            close = difflib.get_close_matches(self.name, ALGORITHMS, 1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out to choose each part by itself"
            raise ValueError(f"algorithm: name must be one of {', '.join(ALGORITHMS)}, got {self.name!r}; {hint}")
        rule = "0, or above 1 and finite"
        check_numbers("algorithm", self, rule, lambda x: x == 0 or 1 < x <= LARGEST, "dual_clip")
        self._check_surrogate()
        self._check_penalties()
        self._check_importance()

    @property
    def parts(self) -> Algorithm:
        """The parts of the run's algorithm: each part that is set, and for the others those of the algorithm ``name``.

        Parts are the fields of ``Algorithm``, such as advantage, surrogate and aggregation.
        """
        named = ALGORITHMS[self.name] if self.name else Algorithm()
        own = {part.name: getattr(self, part.name) for part in fields(Algorithm)}
        return replace(named, **{name: value for name, value in own.items() if value is not None})

    @property
    def optimizer_steps(self) -> int:
        """Most optimizer steps that learn from one rollout."""
        return self.mini_batches * self.epochs

    @property
    def distills(self) -> bool:
        """Tell whether the run learns from a teacher in place of its rewards."""
        return self.parts.advantage == "distill"

    @property
    def loss_settings(self) -> dict[str, float]:
        """Settings that a loss gets as keyword parameters of their names, where it has them."""
        return {"entropy_coef": self.entropy_coef}

    @property
    def samples_greedily(self) -> bool:
        """Tell whether each prompt gets a greedy completion in addition to its samples."""
        return self.greedy_baseline or self.parts.advantage == "remax"

    def check_beside(
        self,
        critic: CriticConfig,
        rollout: VllmConfig,
        limits: LimitsConfig,
        samples_per_prompt: int,
        distill: "DistillConfig",
    ) -> None:
        """Raise ValueError if other settings of the run contradict those of the algorithm."""
        parts, staleness = self.parts, rollout.staleness
        distill.check_beside(self, rollout.top_k)
        if limits.epoch_kl and self.epochs == 1:
            raise ValueError(
                f"config: limits.epoch_kl={limits.epoch_kl} can only end epochs after the first, and algorithm.epochs "
                "is 1; raise --algorithm.epochs or leave --limits.epoch-kl out"
            )
        if self.score_centering and rollout.top_k:
            raise ValueError(
                f"config: algorithm.score_centering={self.score_centering} needs samples of the whole vocabulary, and "
                f"rollout.top_k={rollout.top_k} cuts it; leave --algorithm.score-centering or --rollout.top-k out"
            )
        if critic.train and (self.name or self.advantage) and parts.advantage != "gae":
            raise ValueError(
                f"config: critic.train trains a critic, and advantage={parts.advantage!r} does not read its values; "
                "leave --critic.train out, or set --algorithm.advantage gae"
            )
        if critic.train and parts.surrogate in _SEQUENCE_RATIO:
            raise ValueError(
                f"config: critic.train gives each token an advantage, and surrogate={parts.surrogate!r} has one ratio "
                "for a whole sequence; leave --critic.train out, or set --algorithm.surrogate ppo"
            )
        if staleness and self.samples_greedily:
            raise ValueError(
                f"config: rollout.staleness={staleness} learns from samples of older weights, and the greedy baseline "
                "(ReMax) would compare them with answers of the newest weights; leave --rollout.staleness out, or "
                "leave --algorithm.greedy-baseline out and take another advantage than remax"
            )
        if parts.dynamic_sampling and samples_per_prompt == 1:
            raise ValueError(
                "config: dynamic_sampling needs samples that can differ, got samples_per_prompt=1; raise "
                "--samples-per-prompt or set --algorithm.dynamic-sampling 0"
            )

    def _refuse(self, key: str, reason: str) -> NoReturn:
        """Raise ValueError for a setting, or a part of the algorithm, that others exclude."""
        value = getattr(self.parts, key, getattr(self, key))
        raise ValueError(f"algorithm: {key}={value!r} {reason}")

    def _check_surrogate(self) -> None:
        parts, surrogate = self.parts, self.parts.surrogate
        for key in sorted(_CLIPS_OF["ppo"] - _CLIPS_OF[surrogate]):
            if getattr(self, key) and (self.name or self.surrogate):  # else code may pass another surrogate
                taken = ", ".join(option("algorithm", name) for name in sorted(_CLIPS_OF[surrogate])) or "no clip"
                self._refuse(key, f"is no parameter of surrogate {surrogate}, which has {taken}; leave it out")
        if surrogate in _SEQUENCE_RATIO and parts.aggregation != "sequence_mean":
            self._refuse(
                "aggregation",
                f"lets a sequence count by its length, and surrogate {surrogate} has one ratio for all of it; set "
                "--algorithm.aggregation sequence_mean",
            )
        if surrogate in _SEQUENCE_RATIO and "differs_by_token" in _ADVANTAGES[parts.advantage]:
            self._refuse(
                "advantage",
                f"differs from token to token, and surrogate {surrogate} has one ratio for a whole sequence; take "
                "another advantage, or --algorithm.surrogate ppo",
            )

    def _check_penalties(self) -> None:
        parts = self.parts
        if self.distills and parts.dynamic_sampling:
            self._refuse("dynamic_sampling", "drops groups by a reward that distill does not learn from; leave it out")
        if self.kl_in == "reward" and not parts.kl_coef:
            self._refuse("kl_in", "needs a weight of the KL penalty; set --algorithm.kl-coef")
        if parts.kl_estimate == "k1" and parts.kl_coef and parts.kl_in == "loss":
            self._refuse(
                "kl_estimate", "has a mean gradient of 0 in a loss; take k2 or k3, or --algorithm.kl-in reward"
            )

    def _check_importance(self) -> None:
        bounds, kind = self.importance_bounds, self.importance
        if bounds:
            count = 1 if kind in ("auto", "truncated", "sequence_truncated") else 2
            if kind == "none" or len(bounds) != count or bounds[-1] == 0 or sorted({*bounds}) != [*bounds]:
                expected = {"none": "none"}.get(kind, "an upper bound" if count == 1 else "a lower and an upper bound")
                self._refuse(
                    "importance_bounds", f"with importance {kind} must be {expected}; set --algorithm.importance-bounds"
                )
        if self.score_centering and split_importance(kind)[0] != "token":
            self._refuse(
                "importance",
                "weighs whole sequences, and score centering sums over tokens that were not sampled; leave one of "
                "--algorithm.importance and --algorithm.score-centering out",
            )


def split_importance(importance: str) -> tuple[Level, str]:
    """Split the name of an importance weight into level and kind: ``sequence_masked`` is sequence and masked."""
    level, _, kind = importance.rpartition("_")
    return cast(Level, level or "token"), kind


@dataclass(frozen=True)
class DistillConfig:
    """Distillation: teachers by the source of the row, and the tokens over which the policy is compared with them."""

    teachers: dict[str, str] = field(default_factory=dict)
    """Teachers of rows by their data_source, each source beside its FOLDER or hf:ORG/NAME: openai/gsm8k FOLDER. Rows of
    other sources have the teacher algorithm.reference."""
    top_k: Annotated[int, Ge(0)] = 0
    """Number of the policy's likeliest tokens over which each place has its reverse KL to the teacher, with all other
    tokens as one more class. 0 estimates the KL by the sampled token alone."""

    def __post_init__(self):
        check_types("distill", self)

    def check_beside(self, algorithm: AlgorithmConfig, kept: int) -> None:
        """Raise ValueError if the algorithm, or a rollout of the ``kept`` likeliest tokens, excludes distillation."""
        if not algorithm.distills:
            if self.teachers or self.top_k:
                raise ValueError(
                    f"distill: teachers={self.teachers} and top_k={self.top_k} are of distillation, and "
                    f"algorithm.advantage is {algorithm.parts.advantage}; set --algorithm.name distill, or leave them "
                    "out"
                )
            return
        if not (algorithm.reference or self.teachers):
            raise ValueError(
                "algorithm: distill has no teacher; set --algorithm.reference to its folder, or --distill.teachers to "
                "one for each source of rows"
            )
        if self.teachers and algorithm.parts.kl_coef:
            raise ValueError(
                f"algorithm: kl_coef={algorithm.parts.kl_coef} penalizes the distance from one reference, and "
                "distill.teachers names several models; leave --algorithm.kl-coef out"
            )
        if self.top_k and (kept or algorithm.score_centering):
            raise ValueError(
                f"distill: top_k={self.top_k} compares whole distributions, and rollout.top_k={kept} and "
                f"algorithm.score_centering={algorithm.score_centering} read the likeliest tokens otherwise; leave "
                "--rollout.top-k and --algorithm.score-centering out"
            )

    def name_role(self, source: object) -> str:
        """Return the role of the teacher of rows with this ``data_source``, which may be any JSON value."""
        return f"{TEACHER}{source}" if str(source) in self.teachers else "reference"
