"""The sampler draws what a step learns from: prompts, completions of the current weights, their texts and rewards."""

from collections.abc import Callable
from dataclasses import replace

from engines.batch.samples import Completions, Sampling
from rlworker.cluster.rollout_group import Rollouts
from rlworker.config.run import RunConfig
from rlworker.data.rows import Row, pick_rows
from rlworker.errors import RunError
from rlworker.rewards.pool import RewardPool, Scores
from rlworker.rollouts.metrics import summarise_groups
from rlworker.rollouts.to_batch import PromptGroup
from rlworker.tracking.log import StepClock

TRAINING, CANARY = range(2)
"""Uses that completions are drawn for; each has random numbers of its own."""
_NEWEST_SHARE = 0.2
"""Share of a rollout in the running mean of the completions' lengths."""


class Sampler:
    """Draws prompts, samples and scores.

    Args:
        stop_token_ids: each ends a completion. rows: to draw from.
        phase: ``phase(clock, name)``, the context in which a part of a step runs.
        warn: what to do with a line about rewards that failed.

    Attributes:
        rollouts_done: of training. completion_tokens: running mean of the completions' lengths, which says how long the
            next are expected to be. A checkpoint holds both, since they decide what is sampled next.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer,
        stop_token_ids: tuple[int, ...],
        rows: list[Row],
        rollouts: Rollouts,
        rewards: RewardPool,
        phase: Callable,
        warn: Callable[[str], None],
    ):
        self.config, self.tokenizer, self.stop_token_ids, self.rows = config, tokenizer, stop_token_ids, rows
        self.rollouts, self.rewards, self.phase, self.warn = rollouts, rewards, phase, warn
        self.rollouts_done = 0
        self.completion_tokens = float(config.rollout.max_new_tokens)

    def sample(self, clock: StepClock, version: int) -> tuple[list[PromptGroup], dict[str, float]]:
        """Draw the groups of a step, sampled by weights of ``version``, and metrics of all that were drawn for it.

        With dynamic sampling, zero-variance groups are dropped, and those of further prompts take their
        place as far as these reach (DAPO, arXiv:2503.14476, section 3.2): fewer groups, or none, may be left.
        """
        config, further = self.config, self.config.algorithm.dynamic_sampling
        kept_groups, zero_variance, failures = [], [], {}
        for _ in range(1 + further):
            with self.phase(clock, "rollout"):
                rows = pick_rows(self.rows, config.prompts_per_step, self.rollouts_done, config.seed)
                completions = self.rollouts.generate(rows, self.make_sampling(config.samples_per_prompt))
                _check_versions(completions, version)
            self.rollouts_done += 1
            self._note_lengths(completions)
            with self.phase(clock, "reward"):
                groups, scores = self._score(rows, completions)
            for name, count in scores.count_failures("reward").items():
                failures[name] = failures.get(name, 0) + count
            for group in groups:
                (zero_variance if further and group.has_zero_variance else kept_groups).append(group)
            if len(kept_groups) >= config.prompts_per_step:
                break
        return kept_groups[: config.prompts_per_step], summarise_groups(kept_groups + zero_variance) | failures

    def score_greedy(self, rows: list[Row]) -> Scores:
        """Find the rewards of the most likely completion of each row."""
        return self._score(rows, self.rollouts.generate(rows, replace(self.make_sampling(1), temperature=0.0)))[1]

    def make_sampling(self, count: int, use: int = TRAINING) -> Sampling:
        """Say how ``count`` completions per prompt are drawn for the next rollout, or beside it for another ``use``."""
        rollout, stream = self.config.rollout, (self.config.seed, self.rollouts_done, use)
        return Sampling(
            count,
            rollout.temperature,
            rollout.max_new_tokens,
            stream,
            self.stop_token_ids,
            expected_tokens=self.completion_tokens,
            top_logprobs=self.config.algorithm.score_centering if use == TRAINING else 0,
        )

    def _note_lengths(self, completions: Completions) -> None:
        mean = int(completions.lengths.sum()) / len(completions)
        self.completion_tokens += _NEWEST_SHARE * (mean - self.completion_tokens)

    def _score(self, rows: list[Row], completions: Completions) -> tuple[list[PromptGroup], Scores]:
        """Find the texts and rewards of the completions ``[P * G]``."""
        size, ids = len(completions) // len(rows), [sample.token_ids.tolist() for sample in completions]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        scores = self.rewards.score(texts, [row for row in rows for _ in range(size)])
        if scores.failures:
            self.warn(scores.summarise())
        cuts = [slice(i * size, (i + 1) * size) for i in range(len(rows))]
        parts = zip(rows, cuts, strict=True)
        return [PromptGroup(row, completions[cut], texts[cut], scores.values[cut]) for row, cut in parts], scores


def _check_versions(completions: Completions, version: int) -> None:
    if (versions := set(completions.span_versions.tolist())) != {version}:
        raise RunError(f"rollout: samples of weights {sorted(versions)}, expected version {version} alone")
