"""What the ranks of a vision-language model computed, against HuggingFace one sequence at a time."""

import torch
from support.huggingface import name_gradients, run_forward
from support.ranks.vlm_cases import ROWS, make_vlm_batch, name_part

from engines.models.spec import ModelSpec
from rlworker.checks.huggingface import load_huggingface, probe_loss

LIMITS = {"logits": 1e-5, "logprobs": 1e-5, "gradients": 1e-6}
OF_THE_LARGEST = 2e-6
"""Gradients of Gemma's embedding are multiplied by sqrt(hidden): the limit grows with the largest gradient."""


def compute_vlm_reference(folder: str, images, rows=ROWS) -> dict:
    """Compute logits, logprobs, and gradients by the names in the folder, of the batch that the ranks run."""
    spec = ModelSpec.from_folder(folder)
    model, batch = load_huggingface(spec), make_vlm_batch(spec, images, rows)
    found = run_forward(model, spec, batch, probe_loss)
    (found.loss / batch.mask.sum()).backward()
    return {
        "logits": found.logits.detach(),
        "logprobs": found.outputs.logprobs.detach(),
        "gradients": name_gradients(model, spec),
        "mask": batch.mask,
    }


def check_vlm_ranks(ranks: list[dict], want: dict, measured, label: str, frozen: tuple[str, ...] = ()) -> None:
    """Compare the results of ``run_vlm_case`` with the reference, and note how far they are from it."""
    schedule = ranks[0]["schedule"]
    leaders = sorted((rank for rank in ranks if rank["is_leader"]), key=lambda rank: rank["dp_rank"])
    logits = schedule.restore_order(torch.cat([rank["logits"] for rank in leaders]))
    outputs = schedule.restore([rank["outputs"] for rank in leaders])
    mask = want["mask"]
    found = {
        "logits": float((logits - want["logits"]).abs().max()),
        "logprobs": float((outputs.logprobs - want["logprobs"])[mask].abs().max()),
    }
    differences = {}
    for rank in ranks:
        assert set(rank["gradients"]) == set(want["gradients"])
        for name, gradient in rank["gradients"].items():
            if name_part(name) in frozen:
                assert not gradient.any()
                continue
            difference = float((gradient - want["gradients"][name]).abs().max())
            differences[name] = max(differences.get(name, 0.0), difference)
    worst = max(differences, key=differences.get)
    found["gradients"] = differences[worst]
    measured(found)
    largest = max(float(gradient.abs().max()) for gradient in want["gradients"].values())
    limits = LIMITS | {"gradients": max(LIMITS["gradients"], OF_THE_LARGEST * largest)}
    assert all(found[name] <= limit for name, limit in limits.items()), (label, found, worst)
