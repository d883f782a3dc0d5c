"""What tests measured, by family: whose row a test is in, and what the largest of its values are."""

from types import SimpleNamespace

import pytest
from support.suite.measured import find_largest, name_family


@pytest.mark.parametrize(
    ("nodeid", "row"),
    [
        ("tests/engines/megatron/test_engine_parity.py::test_parity[TP2-CP2-qwen2-tied-bshd-full]", ("qwen2", "bshd")),
        ("tests/engines/megatron/test_engine_parity.py::test_parity[one-gemma3_text-thd]", ("gemma3_text", "thd")),
        ("tests/engines/vllm/test_vlm_rollout.py::test_logprobs[qwen3_vl-1.0]", ("qwen3_vl", "rollout")),
        ("tests/engines/vllm/test_video_rollout.py::test_logprobs[qwen3_vl-1.0]", ("qwen3_vl", "rollout of videos")),
        (
            "tests/engines/megatron/vision/test_video_parity.py::test_parity[qwen3_vl-one-thd]",
            ("qwen3_vl", "thd of videos"),
        ),
        ("tests/engines/vllm/test_vlm_rollout.py::test_logprobs[another-1.0]", None),
        ("tests/engines/models/test_internvl.py::test_what_is_read[internvl]", None),
        ("tests/test_house.py::test_it", None),
    ],
)
def test_a_family_is_found_in_the_parameters_of_a_test(nodeid, row):
    assert name_family(nodeid) == row


def test_the_largest_of_a_family_is_told():
    def report(nodeid: str, *values: dict) -> SimpleNamespace:
        return SimpleNamespace(nodeid=nodeid, user_properties=[("measured", each) for each in values])

    reports = [
        report("a.py::t[one-llama-thd]", {"logits": 1e-6}, {"logits": 3e-6, "gradients": 1e-7}),
        report("b.py::t[TP2-llama-thd]", {"logits": 2e-6}),
        report("b.py::t[TP2-llama-bshd]", {"logits": 5e-6}),
        report("b.py::t[TP2-other]", {"logits": 9e-6}),
    ]
    assert find_largest(reports, name_family) == {
        ("llama", "thd"): (3, {"logits": 3e-6, "gradients": 1e-7}),
        ("llama", "bshd"): (1, {"logits": 5e-6}),
    }
