"""Digests of weights against a plain sum in Python's own integers."""

import numpy as np
import pytest
import torch

from engines.weight_digest import DigestPlan, checksum, sum_columns, sum_rows


def digest(tensor, plan: DigestPlan) -> int:
    digests: dict[str, int] = {}
    list(plan.digest([("a", tensor)], digests))
    return digests["a"]


def mix(number: int) -> int:
    """The odd factor of a number: splitmix64, worked by its definition."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31 | 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [0, 3])
def test_a_digest_is_the_sum_over_rows_and_columns(dtype, columns):
    plan, tensor = DigestPlan(dtype, columns, 5), torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    bits = tensor.to(getattr(torch, dtype)).view(torch.int32 if dtype == "float32" else torch.int16)
    rows = [mix(2**40 + row) for row in range(6)]
    want = sum(a * mix(int(c)) * int(bits[row, c]) for row, a in enumerate(rows) for c in plan.choose(9))
    assert digest(tensor, plan) == want % 2**64 and len(plan.choose(9)) == (columns or 9)


def test_parts_add_up_whatever_their_order_and_a_vector_is_taken_whole():
    plan, tensor = DigestPlan("float32"), torch.randn(6, 4, 5)
    matrix, parts = tensor.reshape(24, 5), []  # a stack of matrices is one below another
    for row, column in ((10, 2), (0, 2), (10, 0), (0, 0)):
        block = matrix[row : row + (14 if row else 10), column : column + (3 if column else 2)]
        places = np.arange(block.shape[1])
        parts.append(sum_rows(sum_columns(block, places, places + column, torch.float32), row))
    assert sum(parts) % 2**64 == digest(tensor, plan)
    vector = torch.randn(100)
    assert digest(vector, plan) == digest(vector, DigestPlan("float32", 3)) != digest(vector.flip(0), plan)


def test_only_what_the_type_keeps_counts():
    """One bit, two tensors' places, but neither the sign of a zero nor what a product may flush to one."""
    tensor = torch.tensor([[1.0, -0.0], [2.0, 1e-40]])
    for dtype, smallest in (("float32", 2**-23), ("bfloat16", 2**-7)):
        plan = DigestPlan(dtype)
        assert digest(tensor, plan) == digest(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), plan) != digest(tensor.t(), plan)
        assert digest(tensor * (1 + smallest), plan) != digest(tensor, plan)
    assert digest(tensor * (1 + 2**-10), DigestPlan("bfloat16")) == digest(tensor, DigestPlan("bfloat16"))
    choices = {tuple(DigestPlan("float32", 4, seed).choose(50)) for seed in range(5)}
    assert len(choices) == 5, "another sample each time"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_is_of_the_values_and_not_of_their_place(dtype):
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert checksum(tensor) == checksum(tensor.t().contiguous().t()) != checksum(tensor.t())
    other = tensor.clone()
    other.view(torch.uint8)[4, 3] ^= 1
    assert checksum(other) != checksum(tensor)
    tensor.untyped_storage().resize_(0)  # which no storage allows that numpy has seen
