"""The engine on a real pretrained model, whose large activations and vocabulary no tiny one has."""

from functools import partial
from unittest.mock import patch

import pytest
from support.ranks.engines_cases import build_engine
from support.ranks.pool import draw_address

from engines.models.spec import ModelSpec
from rlworker.checks.case import make_case
from rlworker.checks.reference.ensemble import compute_reference
from rlworker.checks.reference.huggingface import probe_loss
from rlworker.checks.trainer import CheckedTrainer, check_gradients, check_layouts


def check_numbers(rank, world, address, folder, scratch):
    """HuggingFace's own rounding, and the lines of layouts and gradients."""
    model = ModelSpec.from_folder(folder)
    with patch("rlworker.checks.case._TOKENS", 0):  # half of those that ``rlworker check`` takes
        case = make_case(model, 1, scratch)
    reference = compute_reference(model, case.batch, probe_loss, case.denominator, 1.0)
    engine = build_engine(rank, world, address, folder, {})

    from engines.probes import megatron as probes

    call_ranks = lambda name, *args: [partial(getattr(probes, name), engine)(*args)]  # noqa: E731
    trainer = CheckedTrainer("cpu", engine.config, engine.model, case, reference, call_ranks)
    return reference.rounding, [*check_layouts(trainer), *check_gradients(trainer)]


@pytest.mark.large
@pytest.mark.timeout(900)
def test_it_is_as_far_from_float64_as_huggingface_is(real_rank, smollm2, tmp_path):
    ((rounding, findings),) = real_rank.run(check_numbers, draw_address(), smollm2, str(tmp_path), timeout=800)
    assert rounding and rounding.outputs["logprob mean"] <= 1e-5
    assert [finding.outcome for finding in findings] == ["ok"] * 5, findings
