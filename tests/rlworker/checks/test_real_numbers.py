"""The engine on a real pretrained model, whose large activations and vocabulary no tiny one has."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.ranks.engines_cases import build_engine
from support.ranks.pool import draw_address

from engines.models.spec import ModelSpec
from rlworker.checks.case import make_case
from rlworker.checks.huggingface import compute_reference, probe_loss
from rlworker.checks.trainer import CheckedTrainer, check_gradients, check_layouts

SCRIPT = Path(__file__).parents[3] / "scripts" / "real_model.py"


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M-Instruct, kept beside the packages that it is made of."""
    cache = Path(os.environ.get("RLWORKER_CACHE") or Path.home() / ".cache" / "rlworker")
    made = subprocess.run([sys.executable, SCRIPT, "smollm2", cache / "smollm2"], capture_output=True, text=True)
    if made.returncode and "can the index be reached?" in made.stderr and "DO NOT MATCH" not in made.stderr:
        pytest.skip(f"the package index cannot be reached: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    return str(cache / "smollm2")


def check_numbers(rank, world, address, model, case, reference):
    """The lines of layouts and gradients."""
    engine = build_engine(rank, world, address, model, {})

    from engines.probes import megatron as probes

    call_ranks = lambda name, *args: [partial(getattr(probes, name), engine)(*args)]  # noqa: E731
    trainer = CheckedTrainer("cpu", engine.config, engine.model, case, reference, call_ranks)
    return [*check_layouts(trainer), *check_gradients(trainer)]


@pytest.mark.large
@pytest.mark.timeout(900)
def test_it_is_as_far_from_float64_as_huggingface_is(one_rank, smollm2, tmp_path):
    model = ModelSpec.from_folder(smollm2)
    case = make_case(model, 1, str(tmp_path))
    reference = compute_reference(model, case.batch, probe_loss, case.denominator, 1.0)
    assert reference.rounding and reference.rounding.outputs["logprob mean"] <= 1e-5
    findings = one_rank.run(check_numbers, draw_address(), smollm2, case, reference, timeout=800)[0]
    assert [finding.outcome for finding in findings] == ["ok"] * 5, findings
