"""Where a training step waits for the device: every place that reads a value back from it is on a list."""

import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from support.ranks.engines_cases import build_engine, make_batch, plan, start_process
from support.ranks.pool import draw_address
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlworker.checks.huggingface import probe_loss

ROOT = Path(__file__).parents[2]
PACKAGES = ("hardware", "engines", "rlworker")
ENGINE = "engines/megatron/engine.py"
PER_STEP = {
    f"{ENGINE} MegatronEngine._check_schedule": "the ranks' schedules are compared",
    f"{ENGINE} MegatronEngine._are_gradients_finite": "whether there is a step",
    f"{ENGINE} MegatronEngine._collect_outputs": "logprobs, which the controller gets",
    f"{ENGINE} MegatronEngine._sum_over_replicas": "tokens of the step",
    f"{ENGINE} _reduce": "metrics of every micro-batch, after the last",
    "megatron/core/distributed/finalize_model_grads.py finalize_model_grads": "whether any token counts",
    "megatron/core/optimizer/clip_grads.py get_grad_norm_fp32": "the norm that gradients are clipped by",
}
"""Every place that reads, once a step or once it is over, and what. At a micro-batch none does."""
READS_TENSOR = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "equal", "masked_select")
READS_TENSOR += ("__bool__", "__float__", "__int__", "__index__", "__contains__")
READS_OPERATOR = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


def place() -> str:
    """The innermost function on the stack that is this project's or Megatron's."""
    frame = sys._getframe(2)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname.split(".<locals>")[0]
        if "/megatron/core/" in file:
            return f"megatron/core/{file.rpartition('/megatron/core/')[2]} {name}"
        if any(Path(file).is_relative_to(ROOT / package) for package in PACKAGES):
            return f"{Path(file).relative_to(ROOT)} {name}"
        frame = frame.f_back
    return "elsewhere"


class Operators(TorchDispatchMode):
    """Notes the operators that read, which torch's own code may call too."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.noted = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in READS_OPERATOR and not self.noted:
            self.found.append(place())
        return operator(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    """Notes what Python asks of a tensor's values: on a CPU most of it never gets to an operator."""

    def __init__(self, operators: Operators):
        super().__init__()
        self.operators = operators
        self.names = {getattr(torch.Tensor, name) for name in READS_TENSOR}
        self.names |= {getattr(torch, name) for name in READS_TENSOR if hasattr(torch, name)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in self.names or self.operators.noted:
            return function(*args, **kwargs or {})
        self.operators.found.append(place())
        self.operators.noted = True
        try:
            return function(*args, **kwargs or {})
        finally:
            self.operators.noted = False


def reads_of_steps(rank, world, address, folder):
    """``{place: how often}`` of a step of some micro-batches, of one of a single micro-batch, of one that looks at a
    gradient in backward, and of one with Megatron's own norm."""
    start_process(rank)
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    from engines.megatron import logprobs

    def looks(add):
        return lambda total, *of: (bool(total.any()), add(total, *of))

    looking = patch.object(logprobs, "_add_product", looks(logprobs._add_product))
    theirs = patch.object(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    results = []
    for tokens, change in ((24, None), (10**6, None), (10**6, looking), (10**6, theirs)):
        engine = build_engine(rank, world, address, folder, {"micro_batch_tokens": tokens})
        _, shard = plan(engine, make_batch())
        engine.train_step(shard, probe_loss, 10.0)  # in whose first all is made that is made once
        operators = Operators()
        with change or nullcontext(), operators, Functions(operators):
            engine.train_step(shard, probe_loss, 10.0)
        results.append(({where: operators.found.count(where) for where in operators.found}, len(shard.counts)))
    return results


def test_a_step_reads_back_from_the_device_where_the_list_says(one_rank, make_hf_model):
    case = draw_address(), make_hf_model("qwen2", False)
    several, once, looking, theirs = one_rank.run(reads_of_steps, *case)[0]
    assert several[1] > 2 and once[1] == 1
    assert several[0].keys() == once[0].keys() == PER_STEP.keys()
    grown = {where for where, count in several[0].items() if count > once[0][where]}
    assert grown == {f"{ENGINE} _reduce"}, "read at every micro-batch"
    assert looking[0].keys() - PER_STEP.keys() == {"engines/megatron/logprobs.py _VocabParallelHead.backward"}
    assert theirs[0].keys() - PER_STEP.keys() == {"megatron/core/utils.py local_multi_tensor_l2_norm"}
