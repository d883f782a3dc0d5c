"""The agreement of rollout and trainer on the logprobs of the same tokens, which every step of RL rests on."""

from rlworker.config.run import RunConfig
from rlworker.errors import RunError
from rlworker.tracking.terminal import LOGGER


def check_agreement(config: RunConfig, where: str, difference: dict[str, float]) -> None:
    """Check what ``compare_logprobs`` measured; nothing where no token was to be compared.

    Args:
        where: step or sync, for the message.

    Raises:
        RunError: it is beyond the limits, and the run may not go on all the same.
    """
    if not difference:
        return
    limits = config.logprob_limits
    measured = difference["logprob_diff_mean"], difference["logprob_diff_max"]
    if all(f <= limit for f, limit in zip(measured, limits)):
        return
    text = (
        f"{where}: rollout and trainer disagree on the logprobs of the same tokens: mean "
        f"{measured[0]:.1e}, max {measured[1]:.1e}, limits {limits[0]:.1e} and {limits[1]:.1e}. Weights did not "
        "arrive whole, or the engines compute different models"
    )
    if not config.limits.ignore_logprob_diff:
        raise RunError(
            f"{text}; to go on all the same raise --limits.logprob-diff-mean or set --limits.ignore-logprob-diff"
        )
    LOGGER.warning(text)
