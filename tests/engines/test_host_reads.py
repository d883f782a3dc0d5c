"""Where a training step waits for the device: every place that reads a value back from it is on a list."""

from contextlib import nullcontext
from unittest.mock import patch

from support.ranks.engines_cases import build_engine, make_batch, plan, start_process
from support.ranks.pool import draw_address

from engines.megatron import logprobs
from engines.probes.host_reads import READS_OF_A_STEP, READS_OF_EXPERTS, HostReads
from rlworker.checks.reference.huggingface import probe_loss

ENGINE = "engines/megatron/engine.py"


def reads_of_steps(rank, world, address, folder):
    """``{place: how often}`` of a step of some micro-batches, of one of a single micro-batch, of one that looks at a
    gradient in backward, and of one with Megatron's own norm."""
    start_process(rank)
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    def looks(add):
        return lambda total, *of: (bool(total.any()), add(total, *of))

    looking = patch.object(logprobs, "_add_product", looks(logprobs._add_product))
    theirs = patch.object(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    results = []
    for tokens, change in ((24, None), (10**6, None), (10**6, looking), (10**6, theirs)):
        engine = build_engine(rank, world, address, folder, {"micro_batch_tokens": tokens})
        _, shard = plan(engine, make_batch())
        engine.train_step(shard, probe_loss, 10.0)  # in whose first all is made that is made once
        with change or nullcontext(), HostReads() as reads:
            engine.train_step(shard, probe_loss, 10.0)
        results.append((reads.count(), len(shard.counts)))
    return results


def test_experts_of_one_rank_read_their_load_alone(one_rank, make_hf_model):
    """Their tokens are counted, sorted and multiplied on the device. Spread over ranks, each layer reads how many go
    where."""
    several, *_ = one_rank.run(reads_of_steps, draw_address(), make_hf_model("qwen3_moe", False))[0]
    assert several[1] > 2 and several[0].keys() == (READS_OF_A_STEP | READS_OF_EXPERTS).keys()
    assert [several[0][place] for place in READS_OF_EXPERTS] == [1, 1]


def test_a_step_reads_back_from_the_device_where_the_list_says(one_rank, make_hf_model):
    case = draw_address(), make_hf_model("qwen2", False)
    several, once, looking, theirs = one_rank.run(reads_of_steps, *case)[0]
    assert several[1] > 2 and once[1] == 1
    assert several[0].keys() == once[0].keys() == READS_OF_A_STEP.keys()
    grown = {where for where, count in several[0].items() if count > once[0][where]}
    assert grown == {f"{ENGINE} _reduce"}, "read at every micro-batch"
    assert looking[0].keys() - READS_OF_A_STEP.keys() == {"engines/megatron/logprobs.py _VocabParallelHead.backward"}
    assert theirs[0].keys() - READS_OF_A_STEP.keys() == {"megatron/core/utils.py local_multi_tensor_l2_norm"}
