"""The reference that engines are compared with, against a second oracle that shares no line with it.

Transformers' own forward with labels shifts, picks and normalises by itself, for one target at a time. Its own
processors for sampling divide by the temperature and suppress tokens, its own image processor reads the images, and
torch's ``Categorical`` has the entropy. The weighted loss is added up here, one target after another.
"""

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.factors import IMAGE_FAMILIES
from support.models import make_vlm
from support.ranks.engines_cases import make_batch
from support.ranks.vlm_cases import make_images, make_vlm_batch

from engines.batch.batch import TrainBatch
from engines.models.spec import ModelSpec
from rlworker.checks.huggingface import compute_reference, load_huggingface, probe_loss

TEMPERATURE = 0.7
ROWS = ((), (0,), (1, 3))
"""Images of each sequence."""


def sampling_model(spec: ModelSpec):
    """The model of a folder, whose logits are those that transformers would sample from."""
    from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

    process = LogitsProcessorList(
        [TemperatureLogitsWarper(TEMPERATURE), SuppressTokensLogitsProcessor(spec.banned_tokens)]
    )
    model = load_huggingface(spec)
    model.lm_head.register_forward_hook(lambda module, args, logits: process(None, logits[0])[None])
    return model


def shown(spec: ModelSpec, ids: list[int], paths: list[str]) -> dict:
    """What transformers is given of a sequence's images."""
    if not spec.vision:
        return {}
    from PIL import Image
    from transformers import AutoImageProcessor, AutoProcessor

    name = {"gemma3": "token_type_ids", "internvl": None}.get(spec.model_type, "mm_token_type_ids")
    kinds = {name: torch.tensor([[int(token == spec.vision.image_token) for token in ids]])} if name else {}
    if not paths:
        return kinds
    images = [Image.open(path).convert("RGB") for path in paths]
    if spec.model_type == "internvl":  # the processor of whole rows alone cuts tiles
        processor = AutoProcessor.from_pretrained(spec.folder)
        text = processor.image_token * len(images)
        return {"pixel_values": processor(images=images, text=text, return_tensors="pt")["pixel_values"]}
    pixels = dict(AutoImageProcessor.from_pretrained(spec.folder)(images=images, return_tensors="pt"))
    return kinds | {name: tensor for name, tensor in pixels.items() if name != "num_crops"}


def by_labels(spec: ModelSpec, batch: TrainBatch, paths: list[list[str]]) -> dict:
    """``[N]`` logprobs and entropies, 0 at targets that are never sampled, and gradients by the modules' names."""
    model, total = sampling_model(spec), torch.zeros(())
    logprobs, entropy = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    starts = [0, *accumulate(batch.lengths)]
    for row, (start, stop) in enumerate(zip(starts, starts[1:])):
        ids = [*batch.inputs[start:stop].tolist(), *batch.targets[stop - 1 : stop].tolist()]
        for n in range(start, stop):
            place = n - start + 1
            if ids[place] in spec.banned_tokens:
                continue
            labels = torch.full((1, len(ids)), -100)  # what transformers leaves out
            labels[0, place] = ids[place]
            found = model(torch.tensor([ids]), labels=labels, **shown(spec, ids, paths[row]))
            spread = torch.distributions.Categorical(logits=found.logits[0, place - 1]).entropy()
            logprobs[n], entropy[n] = -found.loss.detach(), spread.detach()
            if batch.mask[n]:
                total = total + float(batch.advantages[n]) * found.loss - 0.1 * spread
    total.backward()
    return {"logprobs": logprobs, "entropy": entropy, "loss": total.detach(), "model": model}


def check(spec: ModelSpec, batch: TrainBatch, paths: list[list[str]]) -> None:
    denominator = float(batch.mask.sum())
    found = compute_reference(spec, batch, probe_loss, denominator, TEMPERATURE)
    want = by_labels(spec, batch, paths)
    assert float((found.logprobs - want["logprobs"]).abs().max()) <= 1e-5
    asked = want["entropy"] != 0
    assert asked[batch.mask].all()
    assert float((found.entropy - want["entropy"])[asked].abs().max()) <= 1e-5
    saved = load_file(Path(spec.folder, "model.safetensors"))
    assert set(found.gradients) == set(saved)
    # A bias that all keys share has no gradient but rounding.
    least = 1e-3 * max(float(parameter.grad.norm()) for parameter in want["model"].parameters()) / denominator
    for parameter in want["model"].parameters():
        (in_folder,) = (key for key, tensor in saved.items() if torch.equal(tensor, parameter))
        gradient = parameter.grad / denominator
        difference = (found.gradients[in_folder] - gradient).norm() / gradient.norm().clamp(min=least)
        assert float(difference) <= 1e-5, in_folder


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False), ("qwen3", True)])
def test_language_model(make_hf_model, family, tied):
    batch = make_batch().gather(np.array([1, 2, 4, 6]))
    assert batch.lengths == (1, 4, 0, 5) and not batch.mask.all()
    check(ModelSpec.from_folder(make_hf_model(family, tied)), batch, [[]] * len(batch))


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_model_that_sees_images(tmp_path, family):
    spec, paths = ModelSpec.from_folder(make_vlm(tmp_path / "model", family)), make_images(tmp_path)
    batch = make_vlm_batch(spec, paths, ROWS)
    assert set(batch.targets.tolist()) & set(spec.banned_tokens)
    check(spec, batch, [[paths[number] for number in row] for row in ROWS])
