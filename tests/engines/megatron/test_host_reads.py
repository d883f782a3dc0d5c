"""Where a training step waits for the device: every place that reads a value back from it is on a list."""

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from support.ranks.engines_cases import build_engine, make_batch, plan, start_process
from support.ranks.pool import free_address
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlworker.checks.huggingface import probe_loss

ROOT = Path(__file__).parents[3]
PER_STEP = {
    "engines/megatron/engine.py _check_schedule": "the ranks' schedules are compared",
    "engines/megatron/engine.py _gradients_are_finite": "whether there is a step",
    "engines/megatron/engine.py _outputs_of": "logprobs, which the controller gets",
    "engines/megatron/engine.py _reduce": "metrics, after the last micro-batch",
    "engines/megatron/engine.py _sum_over_replicas": "tokens of the step",
    "megatron/core/optimizer/clip_grads.py get_grad_norm_fp32": "the norm that gradients are clipped by",
}
"""Places that read once a step, or once a metric; and why."""
PER_MICRO_BATCH: dict[str, str] = {}
"""Places that read at every micro-batch: each is a pause of the device."""
READS_TENSOR = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "equal", "masked_select")
READS_TENSOR += ("__bool__", "__float__", "__int__", "__index__", "__contains__")
READS_OPERATOR = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


def place() -> str:
    """The innermost function on the stack that is this project's or Megatron's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/megatron/core/" in file:
            return f"megatron/core/{file.rpartition('/megatron/core/')[2]} {frame.f_code.co_name}"
        if Path(file).is_relative_to(ROOT) and not Path(file).is_relative_to(ROOT / "tests"):
            return f"{Path(file).relative_to(ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class Functions(TorchFunctionMode):
    """Notes what Python asks of a tensor's values: on a CPU most of it never gets to an operator."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found
        self.names = {getattr(torch.Tensor, name) for name in READS_TENSOR}
        self.names |= {getattr(torch, name) for name in READS_TENSOR if hasattr(torch, name)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.names:
            self.found.append(place())
        return function(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    """Notes the operators that do, which torch's own code may call."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in READS_OPERATOR:
            self.found.append(place())
        return operator(*args, **kwargs or {})


def reads_of_a_step(rank, world, address, folder, settings, prepare=None):
    """``(place, how often)`` of a second training step, in whose first all is made that is made once."""
    start_process(rank)
    engine = build_engine(rank, world, address, folder, settings)
    _, shard = plan(engine, make_batch())
    engine.train_step(shard, probe_loss, 10.0)
    found: list[str] = []
    with ExitStack() as stack:
        if prepare:
            prepare(stack)
        with Functions(found), Operators(found):
            engine.train_step(shard, probe_loss, 10.0)
    return sorted({where: found.count(where) for where in found}.items()), len(shard.counts)


def test_a_step_reads_back_from_the_device_where_the_list_says(one_rank, make_hf_model):
    folder = make_hf_model("qwen2", False)
    case = free_address(), folder, {"micro_batch_tokens": 24}
    found, micro_batches = one_rank.run(reads_of_a_step, *case)[0]
    print(found, micro_batches)
    assert micro_batches > 2 and set(dict(found)) == PER_STEP.keys() | PER_MICRO_BATCH.keys()
    once, _ = one_rank.run(reads_of_a_step, free_address(), folder, {"micro_batch_tokens": 10**6})[0]
    assert dict(once).keys() == dict(found).keys()
    grows = {where for where, count in found if count > dict(once)[where]}
    assert grows - PER_MICRO_BATCH.keys() == {"engines/megatron/engine.py _reduce"}, "read more often"
