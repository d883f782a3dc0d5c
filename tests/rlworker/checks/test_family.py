"""``rlworker check --family TYPE``: what a model type without a file lacks is named."""

import pytest
from support.program import run_program

from rlworker.__main__ import main
from rlworker.checks.config import CheckConfig


def find(model_type: str) -> list[tuple[str, str, str, str]]:
    from rlworker.checks.shapes.family import check_family

    return [(each.check, each.where, each.outcome, each.text) for each in check_family(model_type)]


def list_failures(model_type: str, check: str) -> list[str]:
    return [text for name, _, outcome, text in find(model_type) if name == check and outcome == "FAILED"]


def test_a_type_of_known_pieces_lacks_its_file_alone():
    """Ministral is Mistral with layers of two kinds: all that it is made of is there."""
    found = find("ministral")
    assert [(check, outcome) for check, _, outcome, _ in found] == [
        ("file", "FAILED"),
        ("tensors", "ok"),
        ("rules", "ok"),
        ("positions", "ok"),
        ("settings", "ok"),
        ("tower", "ok"),
    ]
    assert "MinistralForCausalLM" in found[0][3] and "9 tensors" in found[1][3] and "causal, window" in found[2][3]


def test_tensors_that_no_join_takes_are_named_with_their_shapes():
    (first, *others) = list_failures("olmo2", "tensors")
    assert len(others) == 6 and first.startswith("no join takes post_feedforward_layernorm.weight [128]")
    (norm,) = [text for text in others if "q_norm" in text]
    assert norm == "no join takes self_attn.q_norm.weight [128]; qk_norm of _pieces.py states it with the shape [16]"
    assert "nothing takes model.norm.bias [128]" in list_failures("starcoder2", "tensors")


def test_rules_positions_settings_and_towers_that_are_not_built_are_named():
    assert "chunked_attention" in list_failures("llama4", "rules")[0]
    assert "a Tower" in list_failures("llama4", "tower")[0]
    assert "neighbouring entries" in list_failures("glm4", "positions")[0]
    assert "read_partial_rope" in find("phi")[-3][3]
    assert "no tensor is named layers.N" in list_failures("gpt2", "tensors")[0]
    assert "there are none" in list_failures("gpt2", "positions")[0]
    assert "residual_multiplier=1.0" in list_failures("granite", "settings")[0]
    assert "lacks rms_norm_eps" in list_failures("cohere", "settings")[0]


def test_a_type_that_has_a_file_is_checked_as_a_model(monkeypatch):
    """Llama has no settings of a tiny one: transformers' defaults do, with sizes that are tiny."""
    asked = []

    def read_model(config, tell):
        from engines.models.spec import ModelSpec

        model = ModelSpec.from_folder(config.model)
        asked.append((model.model_type, model.layers, model.hidden, config.family))
        return []

    monkeypatch.setattr("rlworker.checks.check.run_check", read_model)
    done = run_program(main, "check", "--family", "llama")
    assert (done.returncode, asked) == (0, [("llama", 4, 128, "")]), done.stderr


def test_it_says_what_cannot_be_checked():
    done = run_program(main, "check", "--family", "nosuch")
    assert done.returncode == 1 and "transformers has no model_type 'nosuch'" in done.stderr
    for beside in ({"self_test": True}, {"model": "folder"}, {"tiny": "phi3"}):
        with pytest.raises(ValueError, match="--family makes a tiny model of its own"):
            CheckConfig(family="llama", **beside)


def test_the_command_ends_with_status_1_where_something_lacks():
    done = run_program(main, "check", "--family", "ministral", "--json")
    assert done.returncode == 1 and '"check": "file"' in done.stdout
