"""Shims for megatron-core 0.16 without TransformerEngine and Apex, and off CUDA: narrow patches in training processes.

Each shim names one fault, says why it exists and returns a function that removes it. The tests remove each shim alone
and expect a training step to fail, so that a shim which upstream no longer needs does not stay.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._device import _device_constructors

Undo = Callable[[], None]


@dataclass(frozen=True)
class Runtime:
    """The functions that replace those of ``torch.cuda``.

    Attributes:
        device_type: as in ``torch.device``; also the middle of a tensor's type string (``torch.npu.FloatTensor``).
    """

    device_type: str
    current_device: Callable
    synchronize: Callable
    get_rng_state: Callable
    set_rng_state: Callable
    manual_seed: Callable


CPU = Runtime(
    "cpu",
    lambda: torch.device("cpu"),
    lambda *_: None,
    lambda *_, **__: torch.get_rng_state(),
    torch.set_rng_state,
    torch.manual_seed,
)


@dataclass(frozen=True)
class Shim:
    """One patch. ``apply`` installs it for a ``Runtime`` and returns the function that removes it.

    Attributes:
        on_cuda: whether CUDA needs the shim too; ``apply`` is then called with None.
    """

    name: str
    reason: str
    apply: Callable[[Any], Undo]
    on_cuda: bool = False


def _replace(owner, attribute: str, value) -> Undo:
    original = getattr(owner, attribute)
    setattr(owner, attribute, value)
    return lambda: setattr(owner, attribute, original)


def _together(*undos: Undo) -> Undo:
    stack = contextlib.ExitStack()
    for undo in undos:
        stack.callback(undo)
    return stack.close


def _factories(runtime: Runtime) -> Undo:
    # ``with torch.device(...)`` looks functions up in a set that torch makes once. It must hold the originals, which
    # the wrappers call: by torch.tensor transformers asks whether a model is built on "meta".
    _device_constructors()

    def elsewhere(factory):
        @functools.wraps(factory)
        def build(*args, **kwargs):
            if kwargs.get("device") == "cuda":
                kwargs["device"] = runtime.device_type
            if kwargs.get("pin_memory") and runtime.device_type == "cpu":
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return build

    return _together(*(_replace(torch, name, elsewhere(getattr(torch, name))) for name in ("tensor", "zeros")))


def _tensor_types(runtime: Runtime) -> Undo:
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    own = "torch." if runtime.device_type == "cpu" else f"torch.{runtime.device_type}."

    def rename(constant):
        if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
            return constant.replace("torch.cuda.", own)
        if isinstance(constant, tuple):
            return tuple(rename(item) for item in constant)
        if isinstance(constant, types.CodeType):
            return constant.replace(co_consts=tuple(map(rename, constant.co_consts)))
        return constant

    functions = (
        DistributedOptimizer.__init__,
        DistributedOptimizer._build_model_and_main_param_groups.__func__,
        Float16OptimizerWithFloat16Params.__init__,
        clip_grads.clip_grad_by_total_norm_fp32,
    )
    return _together(*(_replace(f, "__code__", rename(f.__code__)) for f in functions))


def _rng(runtime: Runtime) -> Undo:
    import megatron.core.tensor_parallel.random as rng

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        if name not in self.states_:
            raise KeyError(f"rng state {name!r} was not added")
        outside = runtime.get_rng_state()
        runtime.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = runtime.get_rng_state()
            runtime.set_rng_state(outside)

    return _together(
        _replace(rng, "_get_cuda_rng_state", lambda *_, **__: runtime.get_rng_state()),
        _replace(rng, "_set_cuda_rng_state", lambda state, *_, **__: runtime.set_rng_state(state)),
        _replace(rng.CudaRNGStatesTracker, "fork", fork),
        _replace(torch.cuda, "get_rng_state", lambda *_, **__: runtime.get_rng_state()),
        _replace(torch.cuda, "manual_seed", runtime.manual_seed),
    )


def _gradient_norm(_: Runtime | None) -> Undo:
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl.__name__ != "local_multi_tensor_l2_norm":
        return lambda: None  # TransformerEngine's or Apex's, which is one kernel

    def norm(chunk_size, noop_flag, tensor_lists, per_tensor, *_):
        return torch.stack(cast(Any, torch)._foreach_norm(tensor_lists[0])).norm().reshape(1), None

    return _replace(clip_grads, "l2_norm_impl", norm)


def _adam(_: Runtime | None) -> Undo:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from hardware.megatron.fused_adam import FusedAdam

    return _together(
        _replace(optimizer, "Adam", FusedAdam),
        _replace(optimizer, "USING_PYTORCH_OPTIMIZER", False),
        _replace(distrib_optimizer, "Adam", FusedAdam),
        _replace(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        _replace(distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    )


def _lone_rank(_: Runtime) -> Undo:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def unless_in_place(collective):
        @functools.wraps(collective)
        def run(output, input, *args, group, **kwargs):
            if group.size() == 1 and output.is_set_to(input):
                return None
            return collective(output, input, *args, group=group, **kwargs)

        return run

    names = ("dist_reduce_scatter_func", "dist_all_gather_func")
    return _together(*(_replace(buffers, name, unless_in_place(getattr(buffers, name))) for name in names))


def import_megatron(with_compile: bool) -> None:
    """Import megatron-core without the tracker of its inference engine, and with ``torch.compile`` or the identity.

    Megatron wraps its small fusions in torch.compile while it is imported, before its own ``disable_jit_fuser`` can be
    called; on a CPU every one of them then starts a C++ compiler in the first step. Weights & Biases, which it imports
    where it finds it, takes each rank half a second and is not used in training processes.
    """
    compile_, tracker = torch.compile, sys.modules.get("wandb")
    if not with_compile:
        torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    cast(dict, sys.modules)["wandb"] = None  # how Python marks a module that cannot be imported
    try:
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
    finally:
        torch.compile = compile_
        del sys.modules["wandb"]
        if tracker:
            sys.modules["wandb"] = tracker


SHIMS = (
    Shim(
        "current_device",
        "megatron places buffers, parameters and p2p shapes on torch.cuda.current_device(), which raises without CUDA",
        lambda runtime: _replace(torch.cuda, "current_device", runtime.current_device),
    ),
    Shim(
        "synchronize",
        "pipeline stages synchronise the device after they tell each other the shapes of what they send",
        lambda runtime: _replace(torch.cuda, "synchronize", runtime.synchronize),
    ),
    Shim(
        "factories",
        'schedules, gradient clipping and the optimizer call torch.tensor and torch.zeros with device="cuda" or '
        "pin_memory=True",
        _factories,
    ),
    Shim(
        "tensor_cuda",
        "tied embeddings under pipeline parallelism move the shared weight with .cuda()",
        lambda runtime: _replace(torch.Tensor, "cuda", lambda self, *_, **__: self.to(runtime.device_type)),
    ),
    Shim(
        "tensor_types",
        "the optimizer recognises parameters and gradients by type strings such as 'torch.cuda.FloatTensor'",
        _tensor_types,
    ),
    Shim(
        "rng",
        "the RNG tracker saves and restores the CUDA generator; here it keeps its states on the device's own, so that "
        "dropout repeats under recomputation and differs between tensor-parallel ranks",
        _rng,
    ),
    Shim(
        "adam",
        "without TransformerEngine or Apex megatron falls back to torch.optim.AdamW, whose distributed checkpoint does "
        "not resume: the step count is kept per parameter and is lost",
        _adam,
        on_cuda=True,
    ),
    Shim(
        "gradient_norm",
        "without TransformerEngine or Apex megatron reads the norm of every parameter's gradient back from the device "
        "by itself, before it adds them up there",
        _gradient_norm,
        on_cuda=True,
    ),
    Shim(
        "lone_rank",
        "over a group of one rank, gloo copies all gradients to sum them and all weights to gather them, where NCCL "
        "leaves a buffer that is its own shard as it is",
        _lone_rank,
    ),
)


INSTALLED: dict[str, Undo] = {}
"""Shims in place in this process: name -> function that removes it."""


def install(runtime: Runtime | None) -> None:
    """Import megatron-core and apply the shims. Call it once per process, before anything else imports megatron.

    Args:
        runtime: replacement of ``torch.cuda``'s functions; None uses ``torch.cuda``.
    """
    import_megatron(with_compile=runtime is None)
    for shim in SHIMS:
        if runtime or shim.on_cuda:
            INSTALLED[shim.name] = shim.apply(runtime)
