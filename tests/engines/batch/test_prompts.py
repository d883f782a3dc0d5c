"""Prompts that sequences have in common: what is alike, who computes it, and how groups are dealt out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch.balance import estimate_costs
from engines.batch.batch import TrainBatch
from engines.batch.beginnings import Beginnings, choose_sharing, find_beginnings, group_prompts
from engines.batch.samples import Image
from engines.batch.schedule import plan_schedule
from engines.config import MegatronConfig
from hardware.attention.mask_spec import Sharing
from hardware.platforms import get_platform

ASKED, CPU = MegatronConfig(share="prompts"), get_platform("cpu")


def find(batch: TrainBatch, config: MegatronConfig = ASKED) -> Beginnings | None:
    return find_beginnings(batch, config, CPU)


def test_prompts_end_where_the_first_sampled_id_is_predicted():
    """Of equal ids a shorter prompt is another one, though what was sampled after it agrees by chance."""
    batch = TrainBatch.from_ids([[1, 2, 3, 4], [1, 2, 3, 9, 9], [1, 2, 3, 4], [7, 8], [1, 2, 3]], [3, 3, 2, 1, 2])
    found = find(batch)
    assert found.order.tolist() == [0, 1, 2, 4, 3] and found.common.tolist() == [0, 3, 0, 2, 0]
    assert found.share(np.arange(5)) == Sharing((0, 0, 2, 3, 2), (0, 3, 0, 0, 2))
    assert found.share(np.array([4, 1, 2])) == Sharing((2, 1, 2), (2, 0, 0))
    assert found.share(np.array([3, 1, 2])) is None


def test_turns_and_weights_change_nothing_and_sequences_that_count_nowhere_share_nothing():
    sampled = [[False, True, False, True], [False, True, False, True], [False] * 4, [False] * 4]
    batch = TrainBatch.from_ids([[5, 6, 7, 8]] * 4, sampled=sampled)
    found = find(replace(batch, weights=torch.ones(12)))
    assert found.order.tolist() == [0, 1, 2, 3] and found.common.tolist() == [0, 1, 0, 0]


def test_other_positions_or_images_are_another_prompt():
    batch = TrainBatch.from_ids([[1, 2, 2, 3], [1, 2, 2, 4]], [3, 3])
    assert find(batch).common.tolist() == [0, 3]
    moved = batch.positions.clone()
    moved[4] = 5
    assert find(replace(batch, positions=moved)) is None
    one, other = (Image(name, name, (28, 28), (1, 2, 2), "") for name in ("one", "other"))
    blocks = torch.tensor([-1, 0, 0, -1, 0, 0])
    for images, alike in (((one, one), True), ((one, other), False)):
        found = find(replace(batch, image_block=blocks, images=tuple((image,) for image in images)))
        assert (found is not None) == alike
    apart = torch.tensor([-1, 0, 0, -1, 0, 1])
    assert find(replace(batch, image_block=apart, images=((one,), (one, one)))) is None


def test_an_image_that_comes_after_what_was_sampled_is_no_part_of_a_prompt():
    one, other = (Image(name, name, (28, 28), (1, 2, 2), "") for name in ("one", "other"))
    sampled = [[False, False, True, False, False]] * 2
    batch = TrainBatch.from_ids([[1, 2, 3, 9, 9]] * 2, sampled=sampled)
    blocks = torch.tensor([-1, -1, -1, 0, -1, -1, -1, 0])
    assert find(replace(batch, image_block=blocks, images=((one,), (other,)))).common.tolist() == [0, 2]


def test_who_shares_where_nobody_said():
    for name in ("cpu", "cuda", "cuda-emulated", "npu-emulated"):
        assert choose_sharing(MegatronConfig(), get_platform(name)) == "prompts"
    assert choose_sharing(MegatronConfig(), get_platform("npu")) == "none"
    assert choose_sharing(ASKED, get_platform("npu")) == "prompts"
    assert choose_sharing(MegatronConfig(layout="bshd"), CPU) == "none"
    for share in ("prompts", "tree"):
        with pytest.raises(
            ValueError, match=rf"share={share} computes common beginnings of sequences once, which layout"
        ):
            MegatronConfig(share=share, layout="bshd")


def make_groups(groups: int, samples: int, prompt: int, response: int, seed: int = 0) -> tuple[np.ndarray, Beginnings]:
    """Lengths of samples with responses of half to one and a half of ``response``, and their prompts."""
    spread = np.random.default_rng(seed).integers(response // 2, response * 3 // 2, groups * samples)
    return prompt + spread, group_prompts(np.repeat(np.arange(groups), samples), np.full(groups * samples, prompt))


def measure(schedule, hidden: int) -> tuple[float, float]:
    """Tokens over those that are computed, and the dearest replica's work over the mean."""
    prompts, lengths = schedule.beginnings, np.asarray(schedule.lengths)
    loads = []
    for replica in schedule.rows:
        loads.append(0)
        for rows in replica:
            shared = prompts.share(rows)
            counts = np.asarray(shared.counts if shared else [0] * len(rows), dtype=np.int64)
            loads[-1] += (estimate_costs(lengths[rows], hidden) - estimate_costs(counts, hidden)).sum()
    return lengths.sum() / schedule.count_computed(), max(loads) / np.mean(loads)


@pytest.mark.parametrize(
    ("case", "replicas", "fewer", "balance"),
    [
        ((32, 8, 1024, 256), 8, 3.1, 1.05),
        ((128, 8, 2048, 512), 64, 3.0, 1.12),
        ((5, 8, 512, 64), 4, 3.0, 1.1),
        ((1, 16, 512, 64), 4, 2.0, 1.1),
    ],
    ids=["groups to spare", "two groups a replica", "a group too many", "one group for all"],
)
def test_groups_are_cut_where_replicas_would_wait(case, replicas, fewer, balance):
    lengths, prompts = make_groups(*case)
    config = MegatronConfig(ranks=replicas, micro_batch_tokens=16384)
    schedule = plan_schedule(lengths.tolist(), config, 2048, replicas, beginnings=prompts)
    saved, imbalance = measure(schedule, 2048)
    assert saved >= fewer and imbalance <= balance, (saved, imbalance)
    assert sorted(np.concatenate([rows for replica in schedule.rows for rows in replica])) == [*range(len(lengths))]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=8),
    replicas=st.integers(1, 4),
    budget=st.integers(1, 100),
    pp=st.sampled_from([1, 2]),
    most=st.sampled_from([None, 3]),
)
def test_every_sequence_is_computed_once_within_the_budget(sizes, replicas, budget, pp, most):
    lengths = [prompt + (own + i) % 21 for prompt, samples, own in sizes for i in range(samples)]
    numbers = np.repeat(np.arange(len(sizes)), [samples for _, samples, _ in sizes])
    prompts = group_prompts(
        numbers, np.repeat([prompt for prompt, _, _ in sizes], [samples for _, samples, _ in sizes])
    )
    config = MegatronConfig(ranks=replicas * pp, pp=pp, micro_batch_tokens=budget)
    schedule = plan_schedule(lengths, config, 64, replicas, most, beginnings=prompts)
    assert sorted(np.concatenate([rows for replica in schedule.rows for rows in replica])) == [*range(len(lengths))]
    assert len({len(replica) for replica in schedule.rows}) == 1
    for rows in (rows for replica in schedule.rows for rows in replica if len(rows) > 1):
        shared = prompts.share(rows)
        assert sum(lengths[row] for row in rows) - sum(shared.counts if shared else ()) <= budget
        assert most is None or len(rows) <= most


def test_shards_carry_what_is_shared_and_their_digest_knows_it():
    batch = TrainBatch.from_ids([[1, 2, 3], [4, 5], [1, 2, 6, 7], [1, 2, 8]], [2, 1, 2, 2])
    plain = plan_schedule(batch.lengths, ASKED, 8, 1)
    schedule = plan_schedule(batch.lengths, ASKED, 8, 1, beginnings=find(batch))
    (shard,) = schedule.shards(batch)
    assert shard.list_sharing() == [Sharing((0, 1, 0, 0), (0, 0, 2, 2))] and schedule.count_computed() == 4
    assert plain.shards(batch)[0].list_sharing() == [None] and plain.count_computed() == batch.num_tokens
    other = replace(schedule, beginnings=group_prompts(np.arange(4), np.ones(4, np.int64)))
    assert len({plain.digest, schedule.digest, other.digest}) == 3 and shard.digest == schedule.digest
    few = plan_schedule(batch.lengths, MegatronConfig(ranks=8), 8, 8, beginnings=find(batch)).shards(batch)
    assert all(shard.list_sharing() == [None] * (len(shard.counts) + shard.num_dummies) for shard in few[4:])


def test_copies_of_keys_and_values_count_within_the_budget():
    """Eight samples of 100 + 20 tokens: 120 slots and 7 x 20 of their own, and 960 tokens' copies at a tenth of a slot
    each, 356 in all: a budget of 300 takes two pieces, where one would do without the copies."""
    lengths, numbers, counts = [120] * 8, np.zeros(8, np.int64), np.full(8, 100)
    config = MegatronConfig(micro_batch_tokens=300)
    for copied, pieces in ((0.0, 1), (0.1, 2)):
        found = replace(group_prompts(numbers, counts), copied_slots=copied)
        (replica,) = plan_schedule(lengths, config, 64, 1, beginnings=found).rows
        assert len(replica) == pieces


# -- trees

TREE = MegatronConfig(share="tree")


def test_a_tree_by_hand():
    """Two prompts that begin alike, and completions that do too."""
    batch = TrainBatch.from_ids([[1, 2, 3, 8, 0], [1, 2, 4, 4, 5, 0], [1, 2, 3, 8, 9, 0], [7, 0]], [3, 3, 3, 1])
    found = find(batch, TREE)
    assert found.order.tolist() == [0, 2, 1, 3] and found.common.tolist() == [0, 4, 2, 0]
    assert found.share(np.arange(4)) == Sharing((0, 0, 0, 3), (0, 2, 4, 0))
    assert found.share(np.array([2, 1])) == Sharing((0, 0), (0, 2)), "the first in the order has what both begin with"
    assert found.share(np.array([1, 0])) == Sharing((1, 1), (2, 0))


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=9), min_size=1, max_size=8),
    seed=st.integers(0, 9),
)
def test_random_trees_hold_each_beginning_once(sequences, seed):
    """As many inputs are computed as a trie of them has nodes, whatever the order of the rows."""
    batch = TrainBatch.from_ids(sequences, [1] * len(sequences))
    rows = np.random.default_rng(seed).permutation(len(sequences))
    found = find(batch, TREE)
    sharing = found.share(rows) if found else None
    chosen = [sequences[row][:-1] for row in rows]
    if sharing:
        sharing.check(tuple(map(len, chosen)))
        for own, owner, count in zip(chosen, sharing.owners, sharing.counts):
            assert own[:count] == chosen[owner][:count]
    trie = {tuple(ids[: n + 1]) for ids in chosen for n in range(len(ids))}
    assert sum(map(len, chosen)) - sum(sharing.counts if sharing else ()) == len(trie)


def test_no_beginning_of_a_tree_ends_within_an_image_that_is_seen_both_ways():
    one = Image("one", "one", (28, 28), (1, 2, 2), "")
    batch = TrainBatch.from_ids([[1, 9, 9, 9, 3], [1, 9, 9, 4, 3]], [4, 4])
    batch = replace(batch, image_block=torch.tensor([-1, 0, 0, 0, -1, 0, 0, -1]), images=((one,), (one,)))
    assert find_beginnings(batch, TREE, CPU).common.tolist() == [0, 3]
    assert find_beginnings(batch, TREE, CPU, whole_images=True).common.tolist() == [0, 1]


def test_a_tree_is_cut_where_replicas_would_wait():
    """32 prompts of 32 tokens after the same 512, eight samples of each: computed at most twice on two replicas."""
    lengths = 544 + np.random.default_rng(0).integers(8, 24, 256)
    common = np.where(np.arange(256) % 8, 544, 512)
    common[0] = 0
    tree = Beginnings(np.arange(256), common)
    plain = plan_schedule(lengths.tolist(), MegatronConfig(), 128, 1).count_computed()
    for replicas, fewer in ((1, 20), (2, 17)):
        config = MegatronConfig(ranks=replicas)
        schedule = plan_schedule(lengths.tolist(), config, 128, replicas, beginnings=tree)
        assert plain / schedule.count_computed() >= fewer
