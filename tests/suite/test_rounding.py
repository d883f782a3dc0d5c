"""Limits of ``support.rounding``: found by hand from a tiny model, and what a wrong limit or a wrong truth changes."""

import json
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support import rounding
from support.huggingface import name_gradients, run_forward
from support.models import make_vlm
from support.ranks import adapter_cases, engines_cases
from support.ranks.adapter_cases import compute_peft
from support.ranks.engines_cases import compute_steps, make_batch
from support.ranks.shared_cases import compute_alone, make_stale
from support.ranks.vlm_cases import make_images
from support.ranks.vlm_parity import compute_vlm_steps
from support.rounding import Draw, Rounding, check_distances, find_key, measure_rounding
from torch.utils._python_dispatch import TorchDispatchMode

from engines.config import LoraConfig
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import computing_in_double, load_huggingface, perturb_weights, probe_loss


@pytest.fixture(scope="module")
def folder(make_hf_model):
    return make_hf_model("qwen2", True)


def note_nothing(values, shares) -> None:
    """Stand in for ``measured``."""


# -- limits


def compute_gradients(draw: Draw, folder: str) -> dict:
    """Compute logits and gradients of the usual batch."""
    spec, batch = ModelSpec.from_folder(folder), make_batch()
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        run = run_forward(model, spec, batch, probe_loss)
        run.loss.backward()
        return {"logits": run.logits, "gradients": name_gradients(model, spec)}


@pytest.fixture(scope="module")
def by_hand(folder) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The truth of logits and gradients in float64, and the largest distance of four moved models in float32.

    That of a gradient counts as no fewer last digits than the middle gradient's.
    """
    spec, batch = ModelSpec.from_folder(folder), make_batch()

    def run(model) -> dict[str, torch.Tensor]:
        forward = run_forward(model, spec, batch, probe_loss)
        forward.loss.backward()
        return {"logits": forward.logits.detach(), **name_gradients(model, spec)}

    with computing_in_double():
        truth = run(load_huggingface(spec, torch.float64))
    largest = dict.fromkeys(truth, 0.0)
    for seed in (1, 2, 3, 4):
        model = load_huggingface(spec, torch.float32)
        perturb_weights(model, seed)
        for name, tensor in run(model).items():
            largest[name] = max(largest[name], float((tensor - truth[name]).abs().max()))
    sizes = {name: float(tensor.abs().max()) for name, tensor in truth.items()}
    shares = sorted(largest[name] / size for name, size in sizes.items() if name != "logits")
    middle = (shares[(len(shares) - 1) // 2] + shares[len(shares) // 2]) / 2
    return truth, {name: max(x, middle * sizes[name] if name != "logits" else 0) for name, x in largest.items()}


def find_faults(want: Rounding, truth: dict[str, torch.Tensor], sizes: dict[str, float]) -> set[str]:
    """Find the tensors of which a fault of its size is found in one number, one tensor after another."""
    found = set()
    for name, size in sizes.items():
        numbers = {other: tensor.clone() for other, tensor in truth.items()}
        numbers[name].view(-1)[0] += size
        logits = numbers.pop("logits")
        distances = {"logits": want.compare("logits", logits), "gradients": want.compare("gradients", numbers)}
        try:
            check_distances(distances, note_nothing, name)
        except AssertionError:
            found.add(name)
    return found


def check_limits(folder: str, truth: dict[str, torch.Tensor], largest: dict[str, float]) -> None:
    """Check that a fault just above four times the largest distance is found in each tensor, and one below in none."""
    want = measure_rounding(compute_gradients, folder, folder=None)
    assert find_faults(want, truth, {name: 4.05 * value for name, value in largest.items()}) == set(truth)
    assert find_faults(want, truth, {name: 3.95 * value for name, value in largest.items()}) == set()


def test_a_fault_just_above_the_limit_is_found_in_every_tensor(folder, by_hand):
    check_limits(folder, *by_hand)
    assert len(by_hand[0]) > 40


WRONG = {
    "a limit ten times wider": partial(patch.object, rounding, "FACTOR", 40.0),
    "a limit of one draw": partial(patch.object, rounding, "SEEDS", (1,)),
    "a reference in fp32": partial(patch.object, Draw, "is_truth", False),
    "a reference with casts to fp32": partial(patch.object, rounding, "computing_in_double", ExitStack),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_limit_is_caught(folder, by_hand, fault):
    """The test above fails under each, or the one below."""
    with WRONG[fault](), pytest.raises(AssertionError):
        check_limits(folder, *by_hand)
        check_truth(compute_gradients, folder)


class _Narrow(TorchDispatchMode):
    """Lists the operators that compute numbers in less than float64; a view of a batch's column computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            is_number = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if is_number and tensor.dtype != torch.float64 and not func.is_view:
                self.names.append(str(func))
        return result


def check_truth(compute, *arguments) -> None:
    """Check that no operator of a truth gives numbers in less than float64, from the loaded weights on."""
    narrow, load = _Narrow(), Draw.load

    def load_unwatched(draw, load_model):
        with torch.utils._python_dispatch._disable_current_modes():
            return load(draw, load_model)

    def computing(draw):
        stack = ExitStack()
        stack.enter_context(rounding.computing_in_double())
        stack.enter_context(narrow)
        return stack

    with patch.object(Draw, "computing", computing), patch.object(Draw, "load", load_unwatched):
        compute(Draw(), *arguments)
    assert not narrow.names, f"{compute.__name__}: {sorted(set(narrow.names))}"


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "qwen3_5_text"])
def test_the_truth_of_steps_has_no_operator_in_fp32(make_hf_model, family):
    with patch.object(engines_cases, "STEPS", 1):
        check_truth(compute_steps, make_hf_model(family, True))


def test_the_truths_of_adapters_and_of_older_samples_have_no_operator_in_fp32(folder):
    with patch.object(adapter_cases, "STEPS", 1):
        check_truth(compute_peft, folder, LoraConfig(rank=4))
    check_truth(compute_alone, folder, "language", make_stale)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_the_truth_of_images_has_no_operator_in_fp32(tmp_path, family):
    images = make_images(tmp_path)
    check_truth(compute_vlm_steps, make_vlm(tmp_path, family), images, ((), (2,)), 0)


# -- single limits


def compute_product(draw: Draw, size: float) -> dict:
    """Compute a product that rounding moves, a number that it does not, and NaN for a size of NaN."""
    numbers = torch.linspace(0.1, size, 64)
    with draw.computing():
        weight = draw.move({"weight": numbers})["weight"]
        product = (weight * weight.sqrt()).sum()
        return {"product": product, "exact": {"three": torch.full((2,), 3.0).to(product)}}


def test_a_number_that_no_draw_moves_may_be_off_by_two_last_digits():
    want = measure_rounding(compute_product, 2.0, folder=None)
    digit = 3.0 * torch.finfo(torch.float32).eps
    assert want.spread["exact"]["three"] == 0.0
    assert want.find_limit("exact", "three") == pytest.approx(2 * digit)
    for off, is_right in ((1.9, True), (2.1, False)):
        distance = want.compare("exact", {"three": torch.tensor([3.0, 3.0 + off * digit], dtype=torch.float64)})
        assert (distance.share <= 1) == is_right and distance.name == "three"


def test_weights_that_adam_moved_have_the_limit_of_the_furthest():
    truth = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    spread = {"a": 1e-6, "b": 3e-6}
    want = Rounding({"weights": truth, "gradients": truth}, {"weights": spread, "gradients": spread})
    assert [want.find_limit("weights", name) for name in "ab"] == pytest.approx([12e-6, 12e-6])
    assert [want.find_limit("gradients", name) for name in "ab"] == pytest.approx([8e-6, 12e-6])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_never_within_a_limit(wrong):
    want = measure_rounding(compute_product, 2.0, folder=None)
    with pytest.raises(AssertionError, match=r"a label: above what rounding does here: .*exact"):
        distance = want.compare("exact", {"three": torch.tensor([3.0, wrong])})
        check_distances({"exact": distance}, note_nothing, "a label")
    with pytest.raises(AssertionError):
        measure_rounding(compute_product, wrong, folder=None)


def test_draws_that_are_no_rounding_are_refused():
    """As near a tie between experts, where a draw takes another than the truth."""

    def choose(draw: Draw) -> dict:
        return {"chosen": torch.tensor([1.0 if draw.is_truth else 1.01], dtype=draw.dtype)}

    with pytest.raises(AssertionError, match=r"chosen of draws are .* last digits off; take another seed of weights"):
        measure_rounding(choose, folder=None)


def test_names_that_are_missing_or_left_over_are_refused():
    want = measure_rounding(compute_product, 2.0, folder=None)
    with pytest.raises(AssertionError, match="three"):
        want.compare("exact", {})


# -- what is kept


def test_draws_are_computed_once_and_kept(tmp_path):
    first = measure_rounding(compute_product, 2.0, folder=tmp_path)
    with patch.object(rounding, "measure_spread", side_effect=AssertionError("computed again")):
        again = measure_rounding(compute_product, 2.0, folder=tmp_path)
        assert again.spread == first.spread
        with pytest.raises(AssertionError, match="computed again"):
            measure_rounding(compute_product, 3.0, folder=tmp_path)
    (kept,) = tmp_path.glob("compute_product-*.json")
    assert json.loads(kept.read_text()) == first.spread


def test_what_is_kept_depends_on_model_sources_libraries_processor_and_settings(tmp_path, monkeypatch):
    for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)  # this run may be one of another processor's kernels
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"1")
    find = partial(find_key, compute_product, (str(model), 1))
    keys = [find()]
    assert find() == keys[0] and find_key(compute_product, (str(model), 2)) != keys[0]
    for change in (
        lambda: (model / "weights").write_bytes(b"2"),
        lambda: monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2"),
        lambda: monkeypatch.setenv("MKL_CBWR", "COMPATIBLE"),
        lambda: monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"),
        lambda: monkeypatch.setattr(rounding, "describe_processor", lambda: "another"),
        lambda: monkeypatch.setattr(rounding, "version", lambda name: "2.0"),
        lambda: monkeypatch.setattr(rounding, "digest_sources", lambda file: b"others"),
    ):
        change()
        keys.append(find())
    assert len(set(keys)) == len(keys)


def test_sources_are_digested_by_what_they_hold(tmp_path):
    (tmp_path / "case.py").write_text("1")
    first = rounding.digest_sources(str(tmp_path / "case.py"))
    (tmp_path / "case.py").write_text("2")
    rounding.digest_sources.cache_clear()
    assert rounding.digest_sources(str(tmp_path / "case.py")) != first
    with patch.object(rounding, "SOURCES", ("gone.py",)), pytest.raises(AssertionError, match=r"gone\.py"):
        rounding.digest_sources(str(tmp_path / "other.py"))
    rounding.digest_sources.cache_clear()
