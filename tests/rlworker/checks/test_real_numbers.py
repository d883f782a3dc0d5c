"""The engine on a real pretrained model, whose large activations and vocabulary no tiny one has."""

from functools import partial

import pytest
from support.ranks.engines_cases import build_engine
from support.ranks.pool import draw_address

from engines.models.spec import ModelSpec
from rlworker.checks.case import make_case
from rlworker.checks.huggingface import compute_reference, probe_loss
from rlworker.checks.trainer import CheckedTrainer, check_gradients, check_layouts


def check_numbers(rank, world, address, model, case, reference):
    """The lines of layouts and gradients."""
    engine = build_engine(rank, world, address, model, {})

    from engines.probes import megatron as probes

    call_ranks = lambda name, *args: [partial(getattr(probes, name), engine)(*args)]  # noqa: E731
    trainer = CheckedTrainer("cpu", engine.config, engine.model, case, reference, call_ranks)
    return [*check_layouts(trainer), *check_gradients(trainer)]


@pytest.mark.large
@pytest.mark.timeout(900)
def test_it_is_as_far_from_float64_as_huggingface_is(one_rank, smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr("rlworker.checks.case._TOKENS", 0)  # half of those that ``rlworker check`` takes
    model = ModelSpec.from_folder(smollm2)
    case = make_case(model, 1, str(tmp_path))
    reference = compute_reference(model, case.batch, probe_loss, case.denominator, 1.0)
    assert reference.rounding and reference.rounding.outputs["logprob mean"] <= 1e-5
    findings = one_rank.run(check_numbers, draw_address(), smollm2, case, reference, timeout=800)[0]
    assert [finding.outcome for finding in findings] == ["ok"] * 5, findings
