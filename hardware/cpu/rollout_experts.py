"""vLLM's experts on a CPU where each device holds some of them: vLLM's own kernel, with other numbers of experts.

The kernel (0.32) takes an expert's number among all for its place among those of the device, and reads whatever lies
there, without a word.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_KERNEL = CPUUnquantizedExperts.apply


def install() -> None:
    """Make the experts of other devices weigh nothing on this one; vLLM adds up what the devices have computed."""
    CPUUnquantizedExperts.apply = _leave_out_others(_KERNEL)


def _leave_out_others(apply: Callable[..., None]) -> Callable[..., None]:
    named = signature(apply)

    @wraps(apply)
    def apply_own(*args, **kwargs) -> None:
        call = named.bind(*args, **kwargs)
        if (places := call.arguments["expert_map"]) is not None:  # [experts], -1 for those of other devices
            own = places[call.arguments["topk_ids"].long()]
            call.arguments["topk_weights"] = call.arguments["topk_weights"].masked_fill(own < 0, 0)
            call.arguments["topk_ids"] = own.clamp(min=0)
        apply(*call.args, **call.kwargs)

    return apply_own
