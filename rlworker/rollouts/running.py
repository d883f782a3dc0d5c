"""Build the parts of a rollout from the settings of a run: rows, codec, loop, limits of an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from engines.models.spec import ModelSpec
from rlworker.base.terminal import log_start
from rlworker.cluster.rollout_group import Rollouts
from rlworker.config.run import RunConfig
from rlworker.data import make_image_reader
from rlworker.data.rows import Rows, list_stop_tokens, load_tokenizer
from rlworker.environments.codec import Codec
from rlworker.environments.policy import EpisodeLimits
from rlworker.environments.processes.pool import ProcessPool
from rlworker.environments.reward import Environment
from rlworker.rollouts.loop import RolloutLoop
from rlworker.rollouts.manager import STREAM
from rlworker.rollouts.questions import Questions
from rlworker.rollouts.scoring import make_questions
from rlworker.rollouts.turn_queue import TurnQueue

if TYPE_CHECKING:
    from rlworker.rollouts.curriculum import Curriculum
    from rlworker.rollouts.scoring.questions import LendFn


def read_sources(config: RunConfig, read: Callable[[str], Rows]) -> tuple[Rows, Curriculum | None]:
    """Read the rows of all sources of a run, and make its curriculum; None where the settings ask for none.

    Args:
        read: reads the rows of a source, given its path.
    """
    settings = config.curriculum
    parts = [read(path) for path in settings.weigh_sources(config.data.train)]
    rows = Rows([row for part in parts for row in part.rows], sum(part.skipped for part in parts))
    if len(parts) == 1 and not settings.buckets and settings.pass_rates == (0, 1):
        return rows, None
    from rlworker.rollouts.curriculum import Curriculum

    curriculum = Curriculum(config, rows.rows, [len(part.rows) for part in parts])
    log_start(f"curriculum: {curriculum.describe()}")
    return rows, curriculum


def make_codec(config: RunConfig, model: ModelSpec) -> Codec:
    """Make the codec of a run's model, which encodes and decodes its text and reads its images.

    It has the model's tokenizer, the ids that end an answer, and for a model with vision an image reader.

    Raises:
        ValueError: the model's folder has no usable tokenizer.
    """
    tokenizer = load_tokenizer(model.folder, config.data.chat_template_args)
    ends = () if config.rollout.ignore_eos else list_stop_tokens(model.folder, tokenizer, model.vocab)
    image_reader = make_image_reader(model, config.run_dir, config.image_memory_mb)
    return Codec(tokenizer, ends, image_reader, config.data, model.vocab, config.rollout.stop)


@contextmanager
def running_loop(
    config: RunConfig,
    environment: Environment,
    pool: ProcessPool,
    rollouts: Rollouts,
    codec: Codec,
    served: Mapping[str, Rollouts] = MappingProxyType({}),
    lend: LendFn | None = None,
) -> Iterator[RolloutLoop]:
    """Run a ``RolloutLoop`` in this context: ahead of the trainer with ``rollout.staleness``, else turn by turn.

    Args:
        served, lend: groups of served models by name, and their turns on shared devices, as ``QuestionQueue``.
    """
    questions = make_questions(served, config.rollout.staleness > 0, lend) if served else Questions()
    if config.rollout.staleness:
        from rlworker.rollouts.requests import RequestQueue

        queue = RequestQueue(rollouts, (config.seed, 0, STREAM))
    else:
        queue = TurnQueue(rollouts)
    with RolloutLoop(environment, pool, rollouts, queue, codec, config.environment.default_reward, questions) as loop:
        yield loop


def set_limits(config: RunConfig) -> EpisodeLimits:
    """Read the limits of one episode from a run's settings."""
    environment = config.environment
    return EpisodeLimits(
        environment.turns,
        environment.tokens or config.longest,
        config.rollout.max_new_tokens,
        environment.time_limit_s,
        environment.tool_limit_s,
        {name: getattr(config.rollout, name) for name in ("temperature", "top_p")},
    )
