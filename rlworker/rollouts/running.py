"""Build the parts of a rollout from the settings of a run: the codec, the loop, the limits of an episode."""

from collections.abc import Iterator
from contextlib import contextmanager

from engines.models.spec import ModelSpec
from rlworker.cluster.rollout_group import Rollouts
from rlworker.config.run import RunConfig
from rlworker.data.rows import list_stop_tokens, load_tokenizer
from rlworker.environments.codec import Codec
from rlworker.environments.policy import EpisodeLimits
from rlworker.environments.processes.pool import ProcessPool
from rlworker.environments.reward import Environment
from rlworker.rollouts.loop import RolloutLoop
from rlworker.rollouts.manager import STREAM


def make_codec(config: RunConfig, model: ModelSpec) -> Codec:
    """Make the codec of a run's model, which encodes and decodes its text and reads its images.

    It has the model's tokenizer, the ids that end an answer, and for a model with vision an image reader.

    Raises:
        ValueError: the model's folder has no usable tokenizer.
    """
    tokenizer = load_tokenizer(model.folder, config.data.chat_template_args)
    ends = () if config.rollout.ignore_eos else list_stop_tokens(model.folder, tokenizer, model.vocab)
    image_reader = None
    if model.vision:
        from rlworker.data.images import build_image_reader

        image_reader = build_image_reader(model, config.run_dir, config.image_memory_mb)
    return Codec(tokenizer, ends, image_reader, config.data, model.vocab, config.rollout.stop)


@contextmanager
def running_loop(
    config: RunConfig, environment: Environment, pool: ProcessPool, rollouts: Rollouts, codec: Codec
) -> Iterator[RolloutLoop]:
    """Run a ``RolloutLoop`` in this context: ahead of the trainer with ``rollout.staleness``, else turn by turn."""
    if config.rollout.staleness:
        from rlworker.rollouts.requests import RequestQueue

        queue = RequestQueue(rollouts, (config.seed, 0, STREAM))
    else:
        from rlworker.rollouts.turn_queue import TurnQueue

        queue = TurnQueue(rollouts)
    with RolloutLoop(environment, pool, rollouts, queue, codec, config.environment.default_reward) as loop:
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
    )
