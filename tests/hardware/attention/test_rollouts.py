"""The capability table of rollouts: what is honoured, by whom, and what a refusal says."""

import pytest

from hardware.attention.rollouts import (
    PLACES,
    ROLLOUTS,
    check_needs,
    check_rollout_override,
    find_needed_arguments,
    find_rollout_backend,
    list_needs_warnings,
    list_rollout_warnings,
)
from hardware.attention.rules import CAUSAL, RULES, Rule
from hardware.platforms import PLATFORMS, get_platform

WINDOW, IMAGES = Rule(window=8), Rule(images=True)
GEMMA = (Rule(window=8, images=True), IMAGES)


STATES = (Rule(state=True), CAUSAL)


def find(platform: str, rules, override=()):
    return find_rollout_backend(get_platform(platform).rollout_backends, rules, override)


def test_every_cell_says_something():
    for backend, cells in ROLLOUTS.items():
        assert set(cells) == set(RULES), backend
        assert all(cell.text and (cell.honoured or cell.nearest) for cell in cells.values())
    for platform in PLATFORMS:
        assert set(get_platform(platform).rollout_backends) <= set(ROLLOUTS)


@pytest.mark.parametrize("platform", ["cpu", "cuda-emulated", "npu-emulated"])
def test_who_emulates_a_device_rolls_out_on_the_cpu(platform):
    assert find(platform, (CAUSAL,)) == find(platform, (CAUSAL, WINDOW)) == "vllm_cpu"
    assert find(platform, GEMMA) == "vllm_cpu_images"
    assert find(platform, GEMMA, ("vllm_cpu/images",)) == "vllm_cpu", "an override takes vLLM's own"


@pytest.mark.parametrize("rules", [(CAUSAL,), (WINDOW, CAUSAL), GEMMA])
def test_on_devices(rules):
    assert find("cuda", rules) == "vllm_cuda" and PLACES["vllm_cuda/images"].evidence == "untested"
    if rules != GEMMA:
        assert find("npu", rules) == "vllm_ascend"
        return
    with pytest.raises(ValueError, match=r"rollout: .*vllm_ascend/images is refused: .*nearest: .*attention-override"):
        find("npu", rules)
    assert find("npu", rules, ("vllm_ascend/images",)) == "vllm_ascend"


def test_states():
    assert find("cuda", STATES) == "vllm_cuda"
    assert find("cpu", STATES) == find("npu-emulated", STATES) == "vllm_cpu_states"
    assert find("npu", STATES) == "vllm_ascend" and PLACES["vllm_ascend/state"].evidence == "untested"


def test_states_on_ascend_are_computed_as_their_kernels_were_read():
    needed = {"enforce_eager": True, "enable_prefix_caching": False}
    assert find_needed_arguments("vllm_ascend", STATES) == needed
    check_needs("vllm_ascend", STATES, "bfloat16", {})
    check_needs("vllm_ascend", STATES, "bfloat16", needed)
    for backend, rules in (("vllm_ascend", (CAUSAL,)), ("vllm_cuda", STATES)):
        check_needs(backend, rules, "float32", {"enforce_eager": False, "enable_prefix_caching": True})
        assert find_needed_arguments(backend, rules) == {} and list_needs_warnings(backend, rules) == []
    (warning,) = list_needs_warnings("vllm_ascend", STATES)
    assert "vllm_ascend/state is untested" in warning and "0.23.0" in warning


@pytest.mark.parametrize(
    ("dtype", "arguments", "message"),
    [
        ("float32", {}, "--rollout.dtype is float32, expected bfloat16; set it"),
        ("bfloat16", {"enforce_eager": False}, "sets enforce_eager False, expected True; leave it out"),
        ("bfloat16", {"enable_prefix_caching": True}, "sets enable_prefix_caching True, expected False; leave it out"),
    ],
)
def test_what_was_not_read_of_states_on_ascend_is_refused(dtype, arguments, message):
    with pytest.raises(ValueError, match=f"rollout: vllm_ascend/state: kernels .* bfloat16 alone, .*{message}"):
        check_needs("vllm_ascend", STATES, dtype, arguments)


@pytest.mark.parametrize("rule", [Rule(causal=False), Rule(chunk=4), Rule(prefix=True)], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_rules_that_no_rollout_honours(platform, rule):
    with pytest.raises(ValueError, match=rf"/{rule.parts[0]} is refused: "):
        find(platform, (rule,))


@pytest.mark.parametrize(
    ("name", "message"),
    [("vllm_cpu/pictures", "names no cell"), ("vllm_cpu_images/images", "works without an override")],
)
def test_an_override_that_does_nothing_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        check_rollout_override((name,))


def test_an_override_is_told():
    check_rollout_override(("vllm_ascend/images",))
    (text,) = list_rollout_warnings(("vllm_ascend/images",))
    assert "vllm_ascend/images" in text and "approximate" in text and PLACES["vllm_ascend/images"].text in text
