"""What the ranks of a vision-language model computed, against HuggingFace one sequence at a time."""

from functools import partial

import torch
from support.huggingface import name_gradients, name_weights, run_forward, take_steps
from support.ranks.vlm_cases import ROWS, make_vlm_batch, name_part
from support.rounding import Draw, Rounding, check_distances, measure_rounding

from engines.config import OptimizerConfig
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import load_huggingface, open_images, probe_loss

OPTIMIZER = OptimizerConfig(lr=5e-4, adam_eps=1e-5, clip_grad=0.5)
"""Of ranks that take the steps of a reference."""


def measure_vlm_rounding(folder: str, images, rows=ROWS, steps: int = 0) -> Rounding:
    """Measure the rounding of ``compute_vlm_steps``."""
    return measure_rounding(compute_vlm_steps, folder, images, rows, steps)


def compute_vlm_steps(draw: Draw, folder: str, images, rows, steps: int) -> dict:
    """Compute logits, logprobs, and gradients by the names in the folder, of the batch that the ranks run; and the
    weights after as many ``steps`` of ``OPTIMIZER``."""
    spec = ModelSpec.from_folder(folder)
    batch = make_vlm_batch(spec, images, rows)
    see, result = open_images(spec, batch, draw.dtype), {}
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        run = partial(run_forward, model, spec, batch, probe_loss, arguments=see)
        for found, _ in take_steps(run, model.parameters(), batch.mask.sum(), OPTIMIZER, max(steps, 1)):
            result = result or {
                "logits": found.logits.detach(),
                "logprobs": found.outputs.logprobs.detach() * batch.mask,
                "gradients": {name: gradient.clone() for name, gradient in name_gradients(model, spec).items()},
            }
        return result | ({"weights": name_weights(model, spec)} if steps else {})


def check_vlm_ranks(ranks: list[dict], want: Rounding, measured, label: str, frozen: tuple[str, ...] = ()) -> None:
    """Compare the results of ``run_vlm_case`` with the reference, and note how far they are from it."""
    schedule = ranks[0]["schedule"]
    leaders = sorted((rank for rank in ranks if rank["is_leader"]), key=lambda rank: rank["dp_rank"])
    outputs = schedule.restore([rank["outputs"] for rank in leaders])
    distances = {
        "logits": want.compare("logits", schedule.restore_order(torch.cat([rank["logits"] for rank in leaders]))),
        "logprobs": want.compare("logprobs", outputs.logprobs),
    }
    if "weights" in want.truth:
        (weights,) = (rank["weights"] for rank in ranks if rank["weights"])
        distances["weights"] = want.compare("weights", weights)
    for rank in ranks:
        # A frozen part has no gradient: what its place holds is the truth's, and has no distance.
        still = {name: want.truth["gradients"][name] for name in rank["gradients"] if name_part(name) in frozen}
        assert not any(rank["gradients"][name].any() for name in still)
        distances["gradients"] = want.compare("gradients", rank["gradients"] | still)
        check_distances(distances, measured, label)
