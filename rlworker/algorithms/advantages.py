"""Advantage estimators: plain functions of a batch with rewards.

``advantage(batch) -> [N]``, or with a critic ``-> ([N] advantages, [N] returns)``; returns are the targets of the
critic's values. Rewards are ``batch.rewards``, one for each sequence, given at its last counting token, and optionally
``turn_rewards`` and ``penalties`` at each token. A completion that was cut at the length limit counts as ended there.

An episode has one or more sequences, and a batch has E episodes. A group compares episodes by the sum of their rewards.
Sums over time run through an episode's counting tokens, over all of its sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from rlworker.algorithms.losses import KlEstimate, kl_k1
from rlworker.base.errors import RunError

_torch = cast(Any, torch)
"""Torch with its multi-tensor operations, which it leaves out of its types."""
_BLOCK = 64
"""Length of the blocks that one row of a matrix product sums."""
_LONG_RUN = 16
"""Mean run length from which runs are copied one by one; shorter runs are faster by index."""
AdvantageFn = Callable[[TrainBatch], Tensor | tuple[Tensor, Tensor]]
Advantage = TypeVar("Advantage", bound=AdvantageFn)


def named(advantage: Advantage) -> Advantage:
    """Mark an advantage estimator that ``--algorithm.advantage`` names by its function.

    Settings read the marks from this file's text, since they are checked before torch is imported.
    """
    return advantage


def differs_by_token(advantage: Advantage) -> Advantage:
    """Mark an advantage estimator that differs from token to token of a sequence."""
    return advantage


# -- of a prompt's group


def group_relative(advantage: Advantage) -> Advantage:
    """Mark an advantage estimator that compares the episodes of a prompt, so that it is 0 for a single one."""
    advantage.group_relative = True
    return advantage


def from_rewards(advantage: Advantage) -> Advantage:
    """Mark an advantage estimator that follows from rewards alone, without logprobs, values or greedy rewards.

    Dynamic sampling asks it which groups teach.
    """
    advantage.from_rewards = True
    return advantage


@named
@group_relative
@from_rewards
def grpo(batch: TrainBatch, eps: float = 1e-4) -> Tensor:
    """Compute the group-relative advantage (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    ``(reward - mean of the prompt's group) / (standard deviation of the group + eps)``, the same for every token of an
    episode. The deviation is the sample's (n - 1); a group of one has none and gets an advantage of zero. For
    instance, rewards 1, 0, 0, 1 have the mean 0.5 and the deviation 0.577: the advantages are 0.866 and -0.866.

    Args:
        batch: with ``rewards`` and ``group``, both ``[B]``; groups are numbered from 0.

    Returns:
        ``[N]`` float32.
    """
    return _repeat_per_token(batch, _normalise_groups(_sum_rewards(batch), _find_groups(batch), eps))


@named
@differs_by_token
@group_relative
@from_rewards
def turn_grpo(batch: TrainBatch, eps: float = 1e-4) -> Tensor:
    """Compute ``grpo`` of each turn, by the sum of the rewards from that turn on.

    A turn is compared with the same turn of the group's other episodes that have it. DeepSeekMath (arXiv:2402.03300,
    section 4.1.3) normalises the rewards of the steps first and then sums; here the sums are normalised. For instance,
    two episodes have the rewards 1, 0 and 0, 4 in their turns. From the first turn on the sums are 1 and 4, from the
    second 0 and 4, so the second episode is better in both.

    An episode's first turn is compared by the episode's whole reward, even if no token was sampled in it.

    Returns:
        ``[N]`` float32, zero where the mask is.
    """
    counting = Selection.from_mask(batch.mask, batch.lengths)
    episode, turn = batch.number_episodes(), counting.gather(_number_turns(batch)).long()  # [B], [n]
    turns = int(turn.max()) + 1 if len(turn) else 1
    place = episode.repeat_interleave(counting.lengths) * turns + turn  # [n], of each counting token in [E * turns]
    rewards = _add_rewards(torch.zeros(len(turn)), batch, counting)
    given = torch.zeros(batch.num_episodes * turns).index_add_(0, place, rewards).view(-1, turns)
    to_go = given.flip(1).cumsum(1).flip(1)
    to_go[:, 0] = _sum_rewards(batch)
    taken = torch.zeros(to_go.numel(), dtype=torch.bool).index_fill_(0, place, True).view(-1, turns)
    taken[:, 0] = True
    group = _find_groups(batch)[:, None] * turns + torch.arange(turns)  # [E, turns], a group for each turn
    advantages = torch.zeros_like(to_go)
    advantages[taken] = _normalise_groups(to_go[taken], group[taken], eps)
    return counting.scatter(advantages.view(-1)[place])


@named
@group_relative
@from_rewards
def dr_grpo(batch: TrainBatch) -> Tensor:
    """Compute ``reward - mean of the group``, not divided by its deviation (Dr. GRPO, arXiv:2503.20783)."""
    return _repeat_per_token(batch, _centre(_sum_rewards(batch), _find_groups(batch))[0])


@named
@group_relative
@from_rewards
def rloo(batch: TrainBatch) -> Tensor:
    """Compute ``reward - mean of the group's other rewards`` (RLOO, arXiv:2402.14740); 0 in a group of one."""
    group = _find_groups(batch)
    centred, count = _centre(_sum_rewards(batch), group)
    return _repeat_per_token(batch, centred * (count / (count - 1).clamp_min(1))[group])


@named
@differs_by_token
@from_rewards
def reinforce_plus_plus(batch: TrainBatch) -> Tensor:
    """Compute the sum of rewards from each token to its episode's end, whitened (REINFORCE++, arXiv:2501.03262).

    The sum is not discounted. ``whiten`` takes mean and deviation over all counting tokens of the batch. The KL penalty
    of the paper must be in the rewards already: ``add_kl_penalty`` puts it there, or a run with ``--algorithm.kl-in
    reward``.

    Returns:
        ``[N]`` float32, zero where the mask is.
    """
    return whiten(returns_to_go(batch), batch.mask)


@named
@group_relative
@from_rewards
def reinforce_plus_plus_baseline(batch: TrainBatch) -> Tensor:
    """Compute ``reward - mean of the group`` of each episode, whitened over the counting tokens (arXiv:2501.03262)."""
    return whiten(dr_grpo(batch), batch.mask)


@named
def remax(batch: TrainBatch) -> Tensor:
    """Compute ``reward - reward of the greedy completion`` of the same prompt (ReMax, arXiv:2310.10505).

    Args:
        batch: with ``greedy_rewards`` ``[B]``, which ``--algorithm.greedy-baseline`` adds in a run.
    """
    greedy = _require_column(batch, "greedy_rewards", "--algorithm.greedy-baseline")
    return _repeat_per_token(batch, _sum_rewards(batch) - _take_per_episode(batch, greedy))


@named
@differs_by_token
def distill(batch: TrainBatch) -> Tensor:
    """Compute ``teacher logprob - policy logprob`` of each token, whose gradient is that of the reverse KL, one token
    ahead.

    Source: MiniLLM, arXiv:2306.08543; on samples of the student as in GKD, arXiv:2306.13649.

    Args:
        batch: with ``ref_logprobs``, logprobs of the teacher, which ``--algorithm.reference`` names.
    """
    return _require_column(batch, "ref_logprobs", "--algorithm.reference") - _get_policy_logprobs(batch)


# -- of each token, with a critic


@named
@differs_by_token
def gae(batch: TrainBatch, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimation (arXiv:1506.02438, equation 16), whitened over the counting tokens.

    ``delta_t = reward_t + gamma * value_{t+1} - value_t`` and ``A_t = sum of (gamma * lam)^k * delta_{t+k}``, where t +
    1 is the episode's next counting token: the sum skips tokens of the environment and prompts of further sequences.
    After the last counting token value and advantage are 0. For instance, values 0.2, 0.4 and a reward of 1 at the end
    have, with gamma = 1 and lam = 0.5, deltas 0.2, 0.6, advantages 0.2 + 0.5 * 0.6 = 0.5, 0.6 before whitening, and
    returns 0.7, 1.

    Args:
        batch: with ``values`` ``[N]``, where ``values[n]`` is the critic's value of the prefix that ends at input n.

    Returns:
        ``[N]`` advantages and ``[N]`` returns, ``A + value`` before whitening; zero where the mask is.
    """
    counting = Selection.from_mask(batch.mask, batch.lengths)
    values = counting.gather(_require_column(batch, "values", "--critic.train"))
    lengths = batch.sum_per_episode(counting.lengths)
    deltas = find_next(values, lengths).mul_(gamma).sub_(values)
    raw = sum_discounted(_add_rewards(deltas, batch, counting), lengths, gamma * lam)
    returns = raw + values
    return counting.scatter(_normalise_(raw)), counting.scatter(returns)


def returns_to_go(batch: TrainBatch, gamma: float = 1.0) -> Tensor:
    """Compute the discounted sum of rewards from each counting token to the end of its episode, ``[N]``."""
    counting = Selection.from_mask(batch.mask, batch.lengths)
    rewards = _add_rewards(torch.zeros(int(counting.lengths.sum())), batch, counting)
    return counting.scatter(sum_discounted(rewards, batch.sum_per_episode(counting.lengths), gamma))


# -- penalties within the reward


def add_kl_penalty(batch: TrainBatch, coef: float, estimate: KlEstimate = kl_k1) -> TrainBatch:
    """Return the batch with ``-coef * KL(policy || reference)`` at each counting token as ``penalties`` ``[N]``.

    Source: arXiv:2203.02155, equation 2, taken token by token.
    """
    penalties = -coef * estimate(_get_policy_logprobs(batch), batch.require_column("ref_logprobs")) * batch.mask
    return replace(batch, penalties=penalties)


def add_overlong_penalty(batch: TrainBatch, max_tokens: int | Tensor, buffer: int | Tensor) -> TrainBatch:
    """Return the batch with lower ``rewards`` for episodes of more than ``max_tokens - buffer`` counting tokens.

    The penalty goes from 0 at ``max_tokens - buffer`` tokens to -1 at ``max_tokens`` (DAPO, arXiv:2503.14476, equation
    13). It counts at the last counting token.

    Args:
        max_tokens, buffer: of all episodes, or of each, ``[E]``.
    """
    tokens = batch.sum_per_sequence(batch.mask.float())
    over = batch.sum_per_episode(tokens) - (max_tokens - buffer)
    penalty, episode = (over / buffer).clamp(0, 1), batch.number_episodes()
    # [B] bool: no counting token follows in its episode, and it has some; one that has none has no penalty either.
    is_last = tokens.cumsum(0) == batch.sum_per_episode(tokens).cumsum(0)[episode]
    return replace(batch, rewards=batch.require_column("rewards") - penalty[episode] * (is_last & (tokens > 0)))


def limit_episodes(batch: TrainBatch, sample_tokens: int, sequence_tokens: int) -> Tensor:
    """Compute the most tokens that each episode could have sampled in the turns that it took, ``[E]`` float32.

    It is the smaller of two limits: that of all its samples, and the room that context leaves in its sequences. For
    instance, three turns of at most 100 tokens in a sequence of at most 250, of which 50 are prompt and observations,
    could have sampled 200.

    Args:
        sample_tokens: most tokens of a sample. sequence_tokens: most tokens of a sequence.
    """
    counting, episode = Selection.from_mask(batch.mask, batch.lengths), batch.number_episodes()
    owners = episode.repeat_interleave(counting.lengths)  # [n], the episode of each counting token
    turns = torch.zeros(batch.num_episodes, dtype=torch.long)
    turns.scatter_reduce_(0, owners, counting.gather(_number_turns(batch)).long() + 1, "amax")
    # A sequence has one token more than targets, and its context is what was not sampled.
    context = torch.as_tensor(batch.lengths) + 1 - counting.lengths  # [B]
    room = batch.sum_per_episode(sequence_tokens - context)
    return torch.minimum(sample_tokens * turns, room).clamp_min(1).float()


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale values ``[N]`` to mean 0 and standard deviation 1 over the mask; elsewhere return zero."""
    out = torch.zeros_like(values)
    out[mask] = _normalise_(values[mask])
    return out


# -- parts


def _add_rewards(numbers: Tensor, batch: TrainBatch, counting: "Selection") -> Tensor:
    """Add the reward of each counting token: its penalty and its own reward, and at the last of a sequence the
    sequence's."""
    for column in (batch.penalties, batch.turn_rewards):
        if column is not None:
            numbers += counting.gather(column)
    numbers[find_last_places(counting.lengths)] += batch.require_column("rewards")[counting.lengths > 0].float()
    return numbers


def _require_column(batch: TrainBatch, name: str, option: str) -> Tensor:
    if (column := getattr(batch, name)) is None:
        raise RunError(f"advantage: the batch has no {name}; set {option}")
    return column


def _sum_rewards(batch: TrainBatch) -> Tensor:
    """Compute ``[E]``, the whole reward of each episode."""
    rewards = batch.require_column("rewards").float()
    for column in (batch.penalties, batch.turn_rewards):
        if column is not None:
            rewards = rewards + batch.sum_per_sequence(column)
    return batch.sum_per_episode(rewards)


def _repeat_per_token(batch: TrainBatch, per_episode: Tensor) -> Tensor:
    """Repeat one value per episode over the tokens of all its sequences: ``[E] -> [N]``."""
    return batch.repeat_per_token(per_episode[batch.number_episodes()])


def _take_per_episode(batch: TrainBatch, per_sequence: Tensor) -> Tensor:
    """Take a number that is equal in all sequences of an episode: ``[B] -> [E]``."""
    return per_sequence.new_empty(batch.num_episodes).index_copy(0, batch.number_episodes(), per_sequence)


def _find_groups(batch: TrainBatch) -> Tensor:
    """Find the group of each episode, ``[E]``."""
    return _take_per_episode(batch, batch.require_column("group"))


def _number_turns(batch: TrainBatch) -> Tensor:
    """Number the turn of each target, ``[N]``; where the batch does not say, the n-th sequence of an episode is its
    n-th turn."""
    if batch.turn is not None:
        return batch.turn
    episode, sequence = batch.number_episodes(), torch.arange(len(batch))
    first = torch.searchsorted(episode, torch.arange(batch.num_episodes))  # [E], its first sequence
    return batch.repeat_per_token(sequence - first[episode])


def _get_policy_logprobs(batch: TrainBatch) -> Tensor:
    """Return logprobs under the policy that sampled: the trainer's own where it has made them."""
    return batch.require_column("rollout_logprobs") if batch.old_logprobs is None else batch.old_logprobs


def _sum_groups(values: Tensor, group: Tensor) -> Tensor:
    return torch.zeros(int(group.max()) + 1, dtype=values.dtype).index_add_(0, group, values)


def _centre(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Compute rewards ``[E]`` less the mean of their group, and the size of each group."""
    count = _sum_groups(torch.ones_like(rewards), group)
    # By sums of float64 the mean of equal rewards is exactly their value. A rest of rounding would be all that there is
    # of a deviation, and divided by it.
    mean = (_sum_groups(rewards.double(), group) / count.clamp_min(1)).float()
    return rewards - mean[group], count


def _normalise_groups(rewards: Tensor, group: Tensor, eps: float) -> Tensor:
    """Bring rewards ``[E]`` to mean 0 and, but for ``eps``, to deviation 1 within their group."""
    centred, count = _centre(rewards, group)
    # The square of 1e20 is infinite in float32.
    variance = _sum_groups(centred.double() ** 2, group) / (count - 1).clamp_min(1)
    return (centred / (variance.sqrt() + eps)[group]).float()


def _normalise_(values: Tensor) -> Tensor:
    """Bring values ``[n]`` to mean 0 and deviation 1, in place; numbers that are all alike become 0."""
    if len(values):
        deviation, mean = torch.std_mean(values.double(), correction=0)  # whose squares are finite
        values.sub_(mean).div_(deviation + 1e-8)
    return values


# -- sums along the sequences of a flat stream, without a loop over time


@dataclass(frozen=True)
class Selection:
    """The places of a flat stream of sequences that a mask selects, to gather their numbers and to scatter them back.

    Attributes:
        total: N, all places.
        lengths: ``[B]``, number of selected places of each sequence.
        runs: lengths of the unselected and selected runs in turn, the first possibly 0.
        index: ``[n]``, the selected places, where runs are short; else None.
    """

    total: int
    lengths: Tensor
    runs: tuple[int, ...]
    index: Tensor | None

    @classmethod
    def from_mask(cls, mask: Tensor, lengths: tuple[int, ...]) -> "Selection":
        """Select the true places of ``mask`` ``[N]``; ``lengths`` are those of the sequences."""
        sizes = torch.tensor(lengths)
        if mask.all():
            return cls(len(mask), sizes, (0, len(mask)), None)
        ends = sizes.cumsum(0)
        counted = mask.cumsum(0, dtype=torch.int32)[(ends - 1).clamp_min(0)].long() * (ends > 0)  # to each one's end
        chosen = counted.diff(prepend=counted.new_zeros(1))
        edges = (mask[1:] != mask[:-1]).nonzero()[:, 0] + 1
        if len(edges) * _LONG_RUN > len(mask):
            return cls(len(mask), chosen, (), mask.nonzero()[:, 0])
        bounds = [0, *([0] if mask[0] else []), *edges.tolist(), len(mask)]
        runs = tuple(b - a for a, b in zip(bounds, bounds[1:]))
        return cls(len(mask), chosen, runs, None)

    def gather(self, column: Tensor) -> Tensor:
        """Return the numbers of ``column`` at the n selected places, ``[N] -> [n]``.

        If all places are selected, it returns ``column`` itself: do not write into the result.
        """
        if self.index is not None:
            return column[self.index]
        return column if self.runs == (0, self.total) else torch.cat(column.split(self.runs)[1::2])

    def scatter(self, numbers: Tensor) -> Tensor:
        """Put ``numbers`` at the selected places, ``[n] -> [N]``, with zero elsewhere.

        If all places are selected, it returns ``numbers`` itself.
        """
        if self.runs == (0, self.total):
            return numbers
        flat = numbers.new_zeros(self.total)
        if self.index is not None:
            return flat.index_copy_(0, self.index, numbers)
        _torch._foreach_copy_(list(flat.split(self.runs)[1::2]), list(numbers.split(self.runs[1::2])))
        return flat


def sum_discounted(x: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """Compute ``y_n = x_n + decay * y_{n+1}`` within each sequence of a flat stream: ``[N] -> [N]``.

    Each sequence is split into blocks, and a matrix product with a triangular matrix sums all blocks at once. The rest
    of a sequence after a block is the sum at the start of the next block, which is the same problem over fewer numbers.
    """
    if not len(x):
        return x.clone()
    blocks = -(-lengths // _BLOCK)
    # Each sequence from a row's start, zeros after its end.
    sizes = torch.stack([lengths, blocks * _BLOCK - lengths], dim=1).flatten().tolist()
    aligned = len(x) == sum(sizes)
    rows = x if aligned else x.new_zeros(sum(sizes))
    if not aligned:
        _torch._foreach_copy_(list(rows.split(sizes)[::2]), list(x.split(sizes[::2])))
    powers = decay ** torch.arange(_BLOCK + 1, dtype=torch.float64)
    apart = torch.arange(_BLOCK)[:, None] - torch.arange(_BLOCK)  # [from, to]
    sums = rows.view(-1, _BLOCK) @ torch.where(apart >= 0, powers[apart.clamp_min(0)], 0.0).to(x.dtype)
    if (blocks > 1).any():
        starts = sum_discounted(sums[:, 0].contiguous(), blocks, decay**_BLOCK)
        sums.addr_(find_next(starts, blocks), powers.flip(0)[:-1].to(x.dtype))
    flat = sums.view(-1)
    return flat if aligned else torch.cat(flat.split(sizes)[::2])


def find_next(numbers: Tensor, lengths: Tensor) -> Tensor:
    """Return for each number the next number of its sequence, and zero for the last, ``[N] -> [N]``."""
    after = torch.empty_like(numbers)
    after[:-1] = numbers[1:]
    after[find_last_places(lengths)] = 0.0
    return after


def find_last_places(lengths: Tensor) -> Tensor:
    """Return the place of the last number of each sequence that is not empty."""
    return (lengths.cumsum(0) - 1)[lengths > 0]
