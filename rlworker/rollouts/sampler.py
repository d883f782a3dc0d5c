"""The sampler draws what a step learns from: prompts, completions of the current weights, their texts and rewards."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completions, Sampling
from engines.models.vision_spec import VisionSpec
from rlworker.cluster.rollout_group import Rollouts
from rlworker.config.run import RunConfig
from rlworker.data.rows import Row, pick_rows
from rlworker.errors import RunError
from rlworker.rewards.pool import RewardPool, Scores
from rlworker.rollouts.metrics import SAMPLES_KEPT, pick_completions, summarise_groups
from rlworker.rollouts.plays import Player, batch_played, describe_episode, score_episodes, summarise_episodes
from rlworker.rollouts.to_batch import Group, PromptGroup, batch_groups
from rlworker.tracking.log import StepClock

TRAINING, CANARY = range(2)
"""Uses that completions are drawn for; each has random numbers of its own."""
_NEWEST_SHARE = 0.2
"""Share of a rollout in the running mean of the completions' lengths."""


class Sampler:
    """Draws prompts, samples and scores.

    Args:
        stop_token_ids: each ends a completion. rows: to draw from.
        scorer: rewards completions, or plays episodes.
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
        scorer: RewardPool | Player,
        phase: Callable,
        warn: Callable[[str], None],
    ):
        self.config, self.tokenizer, self.stop_token_ids, self.rows = config, tokenizer, stop_token_ids, rows
        self.rollouts, self.scorer, self.phase, self.warn = rollouts, scorer, phase, warn
        self.rollouts_done = 0
        self.completion_tokens = float(config.rollout.max_new_tokens)

    def sample(self, clock: StepClock, version: int) -> tuple[list, dict[str, float]]:
        """Draw the groups of a step, sampled by weights of ``version``, and metrics of all that were drawn for it.

        Groups are ``PromptGroup``, or ``EpisodeGroup`` where plays are drawn.

        With dynamic sampling, zero-variance groups are dropped, and those of further prompts take their
        place as far as these reach (DAPO, arXiv:2503.14476, section 3.2): fewer groups, or none, may be left. None are
        left either where nothing was sampled, as every play failed before: there is no token to learn from.
        """
        config, further = self.config, self.config.algorithm.dynamic_sampling
        kept_groups, zero_variance, failures = [], [], {}
        for _ in range(1 + further):
            rows = pick_rows(self.rows, config.prompts_per_step, self.rollouts_done, config.seed)
            groups, scores = self._draw(rows, self.make_sampling(config.samples_per_prompt), partial(self.phase, clock))
            self.rollouts_done += 1
            self._note_samples(groups, version)
            for name, count in scores.count_failures("episode" if self.plays else "reward").items():
                failures[name] = failures.get(name, 0) + count
            for group in groups:
                (zero_variance if further and group.has_zero_variance else kept_groups).append(group)
            if len(kept_groups) >= config.prompts_per_step:
                break
        drawn_groups = kept_groups + zero_variance
        metrics = summarise_groups(drawn_groups) | (summarise_episodes(drawn_groups) if self.plays else {})
        groups = kept_groups[: config.prompts_per_step]
        return groups if any(group.completions.lengths.any() for group in groups) else [], metrics | failures

    def score_greedy(self, rows: list[Row]) -> Scores:
        """Find the rewards of the most likely completion of each row, or of the episode of most likely samples."""
        return self._draw(rows, replace(self.make_sampling(1), temperature=0.0), lambda _: nullcontext())[1]

    @property
    def plays(self) -> bool:
        """Tell whether episodes are drawn."""
        return isinstance(self.scorer, Player)

    def batch(self, groups: list, vision: VisionSpec | None) -> TrainBatch:
        """Batch groups that were drawn."""
        return batch_played(groups, vision) if self.plays else batch_groups(groups, vision)

    def pick(self, groups: list) -> list[dict]:
        """Pick a few of the groups that were drawn, as a run folder's ``rollouts`` has them."""
        if isinstance(self.scorer, Player):
            return [describe_episode(group.episodes[0], self.scorer.codec) for group in groups[:SAMPLES_KEPT]]
        return pick_completions(groups[:SAMPLES_KEPT])

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

    def _draw(self, rows: list[Row], sampling: Sampling, phase: Callable) -> tuple[list, Scores]:
        """Draw the groups of some rows ``[P]``, with their rewards ``[P * G]``; ``phase(name)`` is a part's context."""
        if isinstance(self.scorer, Player):
            with phase("rollout"):
                groups = self.scorer.play(rows, sampling)
            scores = score_episodes(groups)
        else:
            with phase("rollout"):
                completions = self.rollouts.generate(rows, sampling)
            with phase("reward"):
                groups, scores = self._score(self.scorer, rows, completions)
        if scores.failures:
            self.warn(scores.summarise())
        return groups, scores

    def _score(
        self, rewards: RewardPool, rows: list[Row], completions: Completions
    ) -> tuple[list[PromptGroup], Scores]:
        """Find the texts and rewards of the completions ``[P * G]``."""
        size, ids = len(completions) // len(rows), [sample.token_ids.tolist() for sample in completions]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        scores = rewards.score(texts, [row for row in rows for _ in range(size)])
        cuts = [slice(i * size, (i + 1) * size) for i in range(len(rows))]
        parts = zip(rows, cuts, strict=True)
        return [PromptGroup(row, completions[cut], texts[cut], scores.values[cut]) for row, cut in parts], scores

    def _note_samples(self, groups: Sequence[Group], version: int) -> None:
        """Take note of the lengths of samples, which are all of weights of ``version``."""
        versions = {int(each) for group in groups for each in np.unique(group.completions.span_versions)}
        if versions - {version}:
            raise RunError(f"rollout: samples of weights {sorted(versions)}, expected version {version} alone")
        lengths = [group.completions.lengths for group in groups]
        if count := sum(map(len, lengths)):
            mean = int(sum(each.sum() for each in lengths)) / count
            self.completion_tokens += _NEWEST_SHARE * (mean - self.completion_tokens)
