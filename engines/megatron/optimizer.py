"""Megatron's distributed optimizer and learning-rate schedule."""

from typing import cast

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from engines.config import MegatronConfig
from engines.megatron.memory.parts import import_offload


def build_optimizer(module, config: MegatronConfig) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build AdamW, sharded over data- and context-parallel ranks and with gradient clipping, and its schedule.

    Args:
        module: the model wrapped in Megatron's DistributedDataParallel.

    Raises:
        ValueError: a decay has no length.
    """
    if config.optimizer.lr_scheduler != "constant" and not config.optimizer.lr_decay_steps:
        raise ValueError(
            f"actor.optimizer: lr_scheduler={config.optimizer.lr_scheduler!r} needs lr_decay_steps, got 0; set "
            "--actor.optimizer.lr-decay-steps"
        )
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.adam_beta1,
        adam_beta2=config.optimizer.adam_beta2,
        adam_eps=config.optimizer.adam_eps,
        clip_grad=config.optimizer.clip_grad,
        bf16=config.dtype == "bfloat16",
        params_dtype=getattr(torch, config.dtype),
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, [module], use_gloo_process_groups=False)
    parts = cast(list[DistributedOptimizer], cast(ChainedOptimizer, optimizer).chained_optimizers)
    # The part of dense weights is a stub where adapters of experts alone learn, on every rank: it has nothing to store.
    parts[:] = [part for part in parts if not part.is_stub_optimizer]
    if config.optimizer.offload_fraction:
        for part in parts:
            import_offload().OffloadedOptimizer(part, config.optimizer.offload_fraction)
    # The n-th step takes the rate at n: the peak at the last of the warm-up (the first step without one) and min_lr at
    # the first after the decay, so that the last step of a run that decays to 0 still learns.
    warmup = max(config.optimizer.lr_warmup_steps, 1)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(config.optimizer.lr_decay_steps, warmup) + 1,
        lr_decay_style=config.optimizer.lr_scheduler,
        start_wd=config.optimizer.weight_decay,
        end_wd=config.optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run may have been asked to go on for longer: the checkpoint gives the step, the settings the rest.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
    return optimizer, schedule
