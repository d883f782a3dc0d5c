"""The reference that engines are compared with, against a second oracle that shares no line with it.

Transformers' own forward with labels shifts, picks and normalises by itself, for one target at a time. Its own
processors for sampling divide by the temperature and suppress tokens, its own image processor reads the images, and
torch's ``Categorical`` has the entropy. The weighted loss is added up here, one target after another.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.factors import IMAGE_FAMILIES, IMAGE_STATE_FAMILIES
from support.huggingface import run_forward
from support.models import make_vlm
from support.ranks.engines_cases import make_batch
from support.ranks.vlm_cases import make_images, make_vlm_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from rlworker.checks.case import Case, make_case
from rlworker.checks.reference import ensemble
from rlworker.checks.reference.ensemble import Reference, Rounding, compute_reference
from rlworker.checks.reference.huggingface import (
    ManyRows,
    computing_in_double,
    load_huggingface,
    perturb_weights,
    probe_loss,
)
from rlworker.checks.tiny.models import make_tiny_model
from rlworker.checks.tiny.states import build_model
from rlworker.checks.trainer import CheckedTrainer, check_gradients, check_layouts

TEMPERATURE = 0.7
SUMS_APART = 1e-11
"""Most that logprobs in float64 may differ by: other orders of sums make 1e-14, and float32 makes 1e-7."""
ROWS = ((), (0,), (1, 3))
"""Images of each sequence."""


def sampling_model(spec: ModelSpec):
    """The model of a folder, whose logits are those that transformers would sample from."""
    from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

    process = LogitsProcessorList(
        [TemperatureLogitsWarper(TEMPERATURE), SuppressTokensLogitsProcessor(spec.banned_tokens)]
    )
    model = load_huggingface(spec, torch.float64)
    model.lm_head.register_forward_hook(lambda module, args, logits: process(None, logits[0])[None])
    return model


def shown(spec: ModelSpec, ids: list[int], paths: list[str]) -> dict:
    """What transformers is given of a sequence's images."""
    if not spec.vision:
        return {}
    from transformers import AutoImageProcessor, AutoProcessor

    name = {"gemma3": "token_type_ids", "internvl": None}.get(spec.model_type, "mm_token_type_ids")
    kinds = {name: torch.tensor([[int(token == spec.vision.image_token) for token in ids]])} if name else {}
    if not paths:
        return kinds
    images = [Image.open(path).convert("RGB") for path in paths]
    if spec.model_type == "internvl":  # the processor of whole rows alone cuts tiles
        processor = AutoProcessor.from_pretrained(spec.folder)
        text = processor.image_token * len(images)
        return {"pixel_values": processor(images=images, text=text, return_tensors="pt")["pixel_values"].double()}
    pixels = dict(AutoImageProcessor.from_pretrained(spec.folder)(images=images, return_tensors="pt"))
    pixels["pixel_values"] = pixels["pixel_values"].double()
    return kinds | {name: tensor for name, tensor in pixels.items() if name != "num_crops"}


def list_sequences(batch: TrainBatch) -> list[list[int]]:
    """The ids of each sequence, its last target among them."""
    starts = [0, *accumulate(batch.lengths)]
    return [
        [*batch.inputs[start:stop].tolist(), *batch.targets[stop - 1 : stop].tolist()]
        for start, stop in zip(starts, starts[1:])
    ]


def by_labels(spec: ModelSpec, batch: TrainBatch, images: list[dict]) -> dict:
    """``[N]`` logprobs and entropies, 0 at targets that are never sampled, and gradients by the modules' names; all in
    float64."""
    model, total = sampling_model(spec), torch.zeros(())
    logprobs, entropy = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    starts = [0, *accumulate(batch.lengths)]
    for row, (start, stop) in enumerate(zip(starts, starts[1:])):
        ids = list_sequences(batch)[row]
        for n in range(start, stop):
            place = n - start + 1
            if ids[place] in spec.banned_tokens:
                continue
            labels = torch.full((1, len(ids)), -100)  # what transformers leaves out
            labels[0, place] = ids[place]
            found = model(torch.tensor([ids]), labels=labels, **images[row])
            spread = torch.distributions.Categorical(logits=found.logits[0, place - 1]).entropy()
            logprobs[n], entropy[n] = -found.loss.detach(), spread.detach()
            if batch.mask[n]:
                total = total + float(batch.advantages[n]) * found.loss - 0.1 * spread
    total.backward()
    return {"logprobs": logprobs, "entropy": entropy, "loss": total.detach(), "model": model}


def check(spec: ModelSpec, batch: TrainBatch, paths: list[list[str]]) -> None:
    denominator = float(batch.mask.sum())
    found = compute_reference(spec, batch, probe_loss, denominator, TEMPERATURE)
    # Opened within float64, some pixels would be rounded to other whole numbers.
    images = [shown(spec, ids, paths[row]) for row, ids in enumerate(list_sequences(batch))]
    with computing_in_double():
        want = by_labels(spec, batch, images)
    assert float((found.logprobs - want["logprobs"]).abs().max()) <= SUMS_APART
    asked = want["entropy"] != 0
    assert asked[batch.mask].all()
    assert float((found.entropy - want["entropy"])[asked].abs().max()) <= SUMS_APART
    saved = load_file(Path(spec.folder, "model.safetensors"))
    assert set(found.gradients) == set(saved)
    # A bias that all keys share has no gradient but rounding.
    least = 1e-3 * max(float(parameter.grad.norm()) for parameter in want["model"].parameters()) / denominator
    for parameter in want["model"].parameters():
        (in_folder,) = (key for key, tensor in saved.items() if torch.equal(tensor, parameter))
        gradient = parameter.grad / denominator
        difference = (found.gradients[in_folder] - gradient).norm() / gradient.norm().clamp(min=least)
        assert float(difference) <= torch.finfo(torch.float32).eps, in_folder  # in which they are handed on


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False), ("qwen3", True)])
def test_language_model(make_hf_model, family, tied):
    batch = make_batch().gather(np.array([1, 2, 4, 6]))
    assert batch.lengths == (1, 4, 0, 5) and not batch.mask.all()
    check(ModelSpec.from_folder(make_hf_model(family, tied)), batch, [[]] * len(batch))


@pytest.mark.parametrize(
    "family", [*IMAGE_FAMILIES, *(pytest.param(f, marks=pytest.mark.large) for f in IMAGE_STATE_FAMILIES)]
)
def test_model_that_sees_images(tmp_path, family):
    spec, paths = ModelSpec.from_folder(make_vlm(tmp_path / "model", family)), make_images(tmp_path)
    batch = make_vlm_batch(spec, paths, ROWS)
    assert set(batch.targets.tolist()) & set(spec.banned_tokens)
    check(spec, batch, [[paths[number] for number in row] for row in ROWS])


class Types(TorchDispatchMode):
    """The operators that take or give floating point numbers of a type, by the type."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.seen.setdefault(value.dtype, set()).add(str(operator))
        return result


@pytest.mark.parametrize("kind", [pytest.param("qwen2", marks=pytest.mark.large), "gemma3"])
def test_no_operator_of_the_truth_computes_in_float32(tmp_path, kind):
    """Forward and backward; images come in float32, and are cast. Norms, rotary embeddings and softmax as transformers
    has them would show."""
    (tmp_path / "images").mkdir()
    spec = ModelSpec.from_folder(make_tiny_model(tmp_path / "model", kind))
    case, seen = make_case(spec, 1, str(tmp_path / "images")), []
    batch = replace(case.batch, advantages=case.batch.advantages.double()).select(0, 3)
    for double in (True, False):
        with computing_in_double() if double else nullcontext():
            model = load_huggingface(spec, torch.float64)
            with Types() as types:
                run_forward(model, spec, batch, probe_loss).loss.backward()
        seen.append(types.seen)
    casts = {"aten._to_copy.default"} if spec.vision else set()
    assert set(seen[0]) <= {torch.float64, torch.float32} and seen[0].get(torch.float32, set()) <= casts, seen[0]
    assert {"aten.mul.Tensor", "aten._softmax.default", "aten.cos.default"} <= seen[1][torch.float32]


class Ranks:
    """Ranks that computed what HuggingFace did, with errors of a known size.

    Attributes:
        reference: of the outputs and gradients.
        statistic: "mean" moves every logprob alike, "p99" two of a hundred, "max" a single one.
        share: error of the logprobs, in multiples of what rounding makes of the statistic.
        gradient_error: relative error of the gradients.
    """

    def __init__(self, reference: Reference, share: float = 0.0, statistic: str = "mean", gradient_error: float = 0.0):
        self.reference = reference
        self.share = share
        self.statistic = statistic
        self.gradient_error = gradient_error

    def __call__(self, function, *args):
        if function == "compute_outputs":
            error = self.share * self.reference.rounding.outputs[f"logprob {self.statistic}"]
            logprobs = self.reference.logprobs.clone()
            moved = {"mean": len(logprobs), "p99": max(2, len(logprobs) // 50), "max": 1}[self.statistic]
            logprobs[:moved] += error
            return [TokenOutputs(logprobs, self.reference.entropy)]
        if function == "read_gradients":
            scale = 1 + self.gradient_error
            return [{}, {name: (self.reference.gradients[name].double() * scale).float() for name in args[0]}]
        assert function in ("take_gradients", "hidden_states")
        return [self.reference.hidden]


def make_case_of_one_family(make_hf_model, tmp_path) -> tuple[ModelSpec, Case]:
    spec = ModelSpec.from_folder(make_hf_model("llama", False))
    return spec, make_case(spec, 1, str(tmp_path))


@pytest.mark.parametrize(("dtype", "gradient_factor"), [("float32", 4), ("bfloat16", 2)])
def test_limits_are_multiples_of_a_models_own_rounding(make_hf_model, tmp_path, dtype, gradient_factor):
    """Just below a limit passes and just above it fails, so that no limit may be wider by a fifth, let alone by ten."""
    spec, case = make_case_of_one_family(make_hf_model, tmp_path)
    settings = MegatronConfig(dtype=dtype)
    reference = compute_reference(spec, case.batch, probe_loss, case.denominator, 1.0, dtype=getattr(torch, dtype))
    assert reference.rounding
    for statistic, factor in (("mean", 2), ("p99", 2), ("max", 4)):
        own = reference.rounding.outputs[f"logprob {statistic}"]
        for share, outcome in ((0.9 * factor, "ok"), (1.1 * factor, "FAILED")):
            ranks = Ranks(reference, share, statistic)
            trainer = CheckedTrainer("cpu", settings, spec, case, reference, ranks)
            found = [finding for finding in check_layouts(trainer) if "HuggingFace" in finding.where]
            assert [finding.outcome for finding in found] == [outcome] * 2, found
            assert all(f"logprob {statistic} {share * own:.1e} (HuggingFace {own:.1e}" in f.text for f in found)
    own = reference.rounding.gradient
    limit = gradient_factor * own + 8 * torch.finfo(torch.float32).eps
    for share, outcome in ((0.9, "ok"), (1.1, "FAILED")):
        ranks = Ranks(reference, gradient_error=share * limit)
        found = check_gradients(CheckedTrainer("cpu", settings, spec, case, reference, ranks))
        assert [finding.outcome for finding in found] == [outcome] * 2, found
        assert all(f"(HuggingFace {own:.1e}, limit {limit:.1e})" in finding.text for finding in found)


def test_rounding_is_the_largest_of_draws_from_float64(make_hf_model, tmp_path):
    """Each draw is computed here anew, with weights that are rounded otherwise, and compared with float64.

    Every second draw has products of many rows.
    """
    spec, case = make_case_of_one_family(make_hf_model, tmp_path)
    reference = compute_reference(spec, case.batch, probe_loss, case.denominator, 1.0)
    assert reference.rounding
    assert reference.logprobs.dtype == torch.float64
    with computing_in_double():
        truth = run_forward(load_huggingface(spec, torch.float64), spec, case.batch, probe_loss).outputs.logprobs
    assert float((reference.logprobs - truth).abs().max()) <= SUMS_APART
    distances = []
    for draw in range(1, 5):
        model = load_huggingface(spec)
        perturb_weights(model, draw)
        with nullcontext() if draw % 2 else ManyRows():
            logprobs = run_forward(model, spec, case.batch, probe_loss).outputs.logprobs.detach()
        distances.append((logprobs.double() - truth).abs())
    assert len({float(distance.mean()) for distance in distances}) == 4
    outputs = reference.rounding.outputs
    assert outputs["logprob mean"] == pytest.approx(max(float(d.mean()) for d in distances), rel=1e-6)
    assert outputs["logprob p99"] == pytest.approx(max(float(d.quantile(0.99)) for d in distances), rel=1e-6)
    assert outputs["logprob max"] == pytest.approx(max(float(d.max()) for d in distances), rel=1e-6)


def test_half_of_the_draws_have_products_of_many_rows(make_hf_model, tmp_path, monkeypatch):
    spec, case = make_case_of_one_family(make_hf_model, tmp_path)
    entered = []
    monkeypatch.setattr(ensemble, "ManyRows", lambda: entered.append("entered") or nullcontext())
    compute_reference(spec, case.batch.select(0, 1), probe_loss, case.denominator, 1.0)
    assert len(entered) == 2


def test_many_rows_are_computed_by_their_kernel():
    generator = torch.Generator().manual_seed(1)
    layer = torch.nn.Linear(576, 96)
    few = torch.randn(2, 7, 576, generator=generator)
    zeros = torch.zeros(50, 576)
    many = layer(torch.cat([few.view(14, 576), zeros]))
    with ManyRows():
        products = layer(few)
    assert torch.equal(products, many[:14].view(2, 7, 96))

    enough = torch.randn(64, 576, generator=generator)
    usual = layer(enough)
    with ManyRows():
        assert torch.equal(layer(enough), usual)

    shown = few.double().requires_grad_()
    (usual_gradient,) = torch.autograd.grad(layer.double()(shown).sin().sum(), shown)
    with ManyRows():
        (gradient,) = torch.autograd.grad(layer(shown).sin().sum(), shown)
    torch.testing.assert_close(gradient, usual_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_moved_by_at_most_half_a_last_digit(dtype):
    layer = torch.nn.Linear(64, 64).to(dtype)
    before = layer.weight.detach().double()
    perturb_weights(layer, 1)
    moved = layer.weight.detach().double() - before
    last_digit = torch.exp2(before.abs().log2().floor()) * torch.finfo(dtype).eps
    # A number of a type moves by whole last digits: by one if its share of w * eps / 2 is rounded up, and below a power
    # of two digits are half as large.
    assert set((moved / last_digit).abs().unique().tolist()) <= {0.0, 0.5, 1.0}
    assert 0.2 <= float((moved != 0).double().mean()) <= 0.35
    assert abs(float((moved / last_digit).mean())) <= 0.05


def test_limits_are_estimated_where_memory_is_short(make_hf_model, tmp_path, monkeypatch):
    spec, case = make_case_of_one_family(make_hf_model, tmp_path)
    case = replace(case, batch=case.batch.select(0, 3))
    told = []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    short = compute_reference(spec, case.batch, probe_loss, case.denominator, 1.0, tell=told.append)
    assert short.rounding is None and short.logprobs.dtype == torch.float32
    assert "limits are estimated" in told[0] and told[1:] == ["HuggingFace, float32"]
    exact = replace(short, rounding=Rounding(outputs={"logprob mean": 0.0}, hidden={}, gradient=0.0))
    trainer = CheckedTrainer("cpu", MegatronConfig(), spec, case, short, Ranks(exact))
    assert all(finding.text.endswith("limit 1e-04, estimated") for finding in check_layouts(trainer))


def test_transformers_computes_states_in_torch_where_fla_is_installed(monkeypatch):
    """The kernels take no float64 and nothing of a CPU, where references are computed."""
    import transformers

    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.delitem(sys.modules, "causal_conv1d", raising=False)
    there, found = [], torch.nn.Module()
    found.get_input_embeddings = lambda: torch.nn.Embedding(2, 2)  # pyright: ignore

    def note(*_, **__):
        there.append([name for name in ("fla", "causal_conv1d") if find_spec(name)])
        return found

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", note)
    assert build_model(transformers.AutoModelForCausalLM, transformers.PretrainedConfig()) is found
    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "from_pretrained", note)
    load_huggingface(SimpleNamespace(architecture="Qwen2ForCausalLM", folder="", experts=None))  # pyright: ignore
    assert there == [[], []] and sys.modules["fla"] is not None and "causal_conv1d" not in sys.modules
