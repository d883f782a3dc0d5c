"""The emulated ``npu_fusion_attention``: for each rule a call that breaks it and one that does not; its arithmetic."""

import subprocess
import sys

import pytest
import torch
from support.attention import check_refusals

from hardware.attention.contract import NotEmulatedError, RefusedError, SilentError
from hardware.npu.emulated import EmulatedNpuPlatform
from hardware.npu.emulator.contract import REQUIREMENTS
from hardware.npu.emulator.examples import DIM, HEADS, KV_HEADS, make_example_call, make_examples, make_pack
from hardware.npu.emulator.operator import install
from hardware.npu.kernel_call import LAYOUTS, build_triangle

OPEN = torch.zeros(6, 6, dtype=torch.bool)
TRIANGLE = build_triangle()  # once: it has four million entries
EXAMPLES = make_examples()


@pytest.fixture(scope="module", autouse=True)
def operator():
    install()


def call(**changes):
    return torch.ops.npu.npu_fusion_attention(**make_example_call(**{"atten_mask": TRIANGLE} | changes))[0]


def test_a_call_that_breaks_a_requirement_raises_and_one_that_keeps_it_does_not():
    check_refusals(REQUIREMENTS, EXAMPLES, call)


@pytest.mark.parametrize(
    ("changes", "requirement"),
    [
        (make_pack([2, 3, 4], [2, 3, 4], actual_seq_qlen=[2, 5, 0], actual_seq_kvlen=[2, 5, 0]), "lengths cumulative"),
        (make_pack([3, 5], [3, 5], actual_seq_qlen=[3, 8, 0], actual_seq_kvlen=[3, 5, 8]), "lengths cumulative"),
        (make_pack([3, 5], [3, 5], atten_mask=TRIANGLE[None, None]), "compressed mask shape"),
        (make_pack([3, 5], [8, 0], atten_mask=None, sparse_mode=0), "rows that see nothing"),
        (make_pack([3, 5], [3, 5], input_layout="tnd"), "input_layout"),
    ],
    ids=["tail left out", "left out of one", "4-D in a pack", "a sequence without keys", "small letters"],
)
def test_further_calls_that_break_a_requirement(changes, requirement):
    with pytest.raises((RefusedError, SilentError), match=f"emulated: {requirement}"):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(attention_mask=TRIANGLE), "attention_mask"),
        (dict(pre_tokens=3), "pre_tokens"),
        (make_pack([3, 5], [3, 5], actual_seq_qlen=torch.tensor([3, 8])), "actual_seq_qlen"),
        (make_pack([3, 5], [3, 5], actual_seq_qlen=[3.0, 8.0]), "actual_seq_qlen"),
    ],
    ids=["keyword of another operator", "keyword of v2", "tensor for a list", "floats"],
)
def test_arguments_are_parsed_as_on_the_device(changes, error):
    with pytest.raises((RuntimeError, TypeError), match=error):
        call(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(pse=torch.zeros(2, 4, 6, 6)),
        dict(keep_prob=0.5),
        dict(sparse_mode=0, atten_mask=OPEN),
        *(dict(sparse_mode=mode) for mode in (5, 6, 7, 8)),
    ],
)
def test_what_is_not_computed_raises(changes):
    with pytest.raises(NotEmulatedError, match="is not computed"):
        call(**changes)
    assert {"pse", "sink", "dropout", "hccl"} < set(EmulatedNpuPlatform.not_covered)


BESIDE = """
import torch
import hardware.npu.emulator.operator
from hardware.npu.emulator.schemas import SCHEMAS
library = torch.library.Library("npu", "DEF")
library.define(SCHEMAS["npu_fusion_attention"])
library.impl("npu_fusion_attention", lambda *_, **__: None, "PrivateUse1")
hardware.npu.emulator.operator.install()
x = torch.randn(3, 1, 4, requires_grad=True)
ends = dict(actual_seq_qlen=[3], actual_seq_kvlen=[3])
out = torch.ops.npu.npu_fusion_attention(x, x, x, 1, "TND", scale=0.5, **ends)[0]
out.sum().backward()
print(torch.allclose(out[:, 0], ((x[:, 0] @ x[:, 0].T) * 0.5).softmax(-1) @ x[:, 0]), bool(x.grad.abs().sum() > 0))
"""


def test_beside_the_real_operator_it_takes_the_tensors_of_the_cpu():
    """Where torch_npu is installed torch loads it by itself, and the operator is there before."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BESIDE], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


# -- arithmetic


def by_hand(query, key, value, see):
    """``[N, Sq, D]`` by the formula: softmax over what a query sees, each key head for a group of query heads."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (key, value))
    scores = (query @ key.transpose(1, 2)) * DIM**-0.5
    return scores.masked_fill(~see, -torch.inf).softmax(-1) @ value


def matrix(*rows: str) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


MODES = {
    "1": (2, 3, dict(sparse_mode=1, atten_mask=~matrix("x.x", ".xx"))),
    "2": (2, 4, dict(sparse_mode=2)),
    "3": (2, 4, dict(sparse_mode=3)),
    "4": (3, 4, dict(sparse_mode=4, pre_tockens=1, next_tockens=0)),
    "no mask": (2, 3, dict(sparse_mode=0, atten_mask=None)),
}
"""``sparse_mode`` -> queries, keys and arguments of one sequence."""
SEEN = {
    "1": matrix("x.x", ".xx"),
    "2": matrix("x...", "xx.."),
    "3": matrix("xxx.", "xxxx"),
    "4": matrix("xx..", ".xx.", "..xx"),
    "no mask": matrix("xxx", "xxx"),
}
"""Who then sees whom, as the documentation's figures have it."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_who_sees_whom_in_each_mode(mode, layout):
    queries, keys, arguments = MODES[mode]
    torch.manual_seed(1)
    sizes = (HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)
    drawn = [torch.randn(*size, DIM, requires_grad=True) for size in sizes]
    forms = {
        "BNSD": lambda x: x[None],
        "BSND": lambda x: x.transpose(0, 1)[None],
        "BSH": lambda x: x.transpose(0, 1).flatten(1)[None],
        "SBH": lambda x: x.transpose(0, 1).flatten(1)[:, None],
        "TND": lambda x: x.transpose(0, 1),
    }
    lengths = dict(actual_seq_qlen=[queries], actual_seq_kvlen=[keys]) if layout == "TND" else {}
    tensors = dict(zip(("query", "key", "value"), map(forms[layout], drawn)))
    got = call(input_layout=layout, **{"atten_mask": TRIANGLE, **tensors, **lengths, **arguments})
    want = by_hand(*drawn, SEEN[mode])
    assert torch.allclose(got, forms[layout](want), atol=1e-6)
    weight = torch.randn_like(want)
    gradients = [torch.autograd.grad((x * w).sum(), drawn) for x, w in ((got, forms[layout](weight)), (want, weight))]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def test_sequences_of_a_pack_have_their_own_part_of_a_whole_mask():
    """A mask ``[T, T]`` in TND, which the tiling takes: each sequence reads the block on its diagonal."""
    torch.manual_seed(4)
    mask = torch.rand(8, 8) < 0.5
    mask.fill_diagonal_(False)
    arguments = make_pack([3, 5], [3, 5], sparse_mode=1, atten_mask=mask)
    out = call(**arguments)
    for start, end in ((0, 3), (3, 8)):
        parts = [arguments[name][start:end].transpose(0, 1) for name in ("query", "key", "value")]
        want = by_hand(*parts, ~mask[start:end, start:end])
        assert torch.allclose(out[start:end].transpose(0, 1), want, atol=1e-6)


def test_a_row_without_a_key_is_zero_where_the_call_allows_for_it():
    mask = OPEN.clone()
    mask[2] = True
    out = call(atten_mask=mask, sparse_mode=1, inner_precise=2)
    assert (out[:, :, 2] == 0).all() and (out[:, :, 1] != 0).all()
