"""A vision-language model learns to name and count squares on a laptop CPU: Ray, Megatron-core, vLLM, nothing stubbed.

A tiny Qwen2.5-VL and its images are made on the spot, warmed up on answers until it is right in about half of them,
then trained by GRPO from the reward alone, vision tower included. Held-out images are never trained on.
"""

from recipes.common import squares
from recipes.common.toys import Toy, run_toy
from recipes.demos import cpu as demo_cpu
from rlworker import AlgorithmConfig, DataConfig, MegatronConfig, OptimizerConfig, VllmConfig

_WARM_UP = dict(lr=1e-3, min_lr=1e-3, lr_warmup_steps=30, lr_scheduler="constant", adam_beta2=0.98, weight_decay=0.01)
SQUARES = Toy(squares.make_data, squares.make_model, demo_cpu.warm_up_on_answers(_WARM_UP, rows=128))
DEFAULT = demo_cpu.DemoConfig(
    run_dir="runs/demo_vlm",
    data=DataConfig(max_prompt_tokens=16),
    actor=MegatronConfig(
        ranks=2,
        optimizer=OptimizerConfig(lr=5e-4, min_lr=5e-5, lr_scheduler="linear", lr_warmup_steps=5, adam_beta2=0.99),
    ),
    rollout=VllmConfig(max_new_tokens=3, max_model_len=32, max_num_seqs=512, kv_cache_mb=256),
    algorithm=AlgorithmConfig(mini_batches=2),
    warm_up_loss=0.45,
    steps=140,
    prompts_per_step=64,
    samples_per_prompt=8,
    eval_every=20,
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, SQUARES)
