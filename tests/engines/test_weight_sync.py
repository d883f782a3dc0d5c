import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.weight_sync import WeightBucket, pack_buckets, share_bucket


def weights():
    torch.manual_seed(0)
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).to(torch.bfloat16)),
        ("c", torch.randn(4, 4).t()),
        ("d", torch.randn(64)),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**9])
def test_what_is_packed_comes_out(bucket_bytes):
    buckets = list(pack_buckets(iter(weights()), bucket_bytes))
    assert [last for _, last in buckets] == [False] * (len(buckets) - 1) + [True]
    assert [bucket.first for bucket, _ in buckets] == [True] + [False] * (len(buckets) - 1)
    assert len(buckets) == {1: 4, 100: 3, 10**9: 1}[bucket_bytes]
    out = [pair for bucket, _ in buckets for pair in bucket.tensors()]
    for (name, tensor), (want_name, want) in zip(out, weights(), strict=True):
        assert name == want_name and tensor.dtype == want.dtype and torch.equal(tensor, want)


def test_no_weights_make_no_bucket():
    assert list(pack_buckets(iter([]), 100)) == []


def test_a_flipped_bit_is_found():
    ((bucket, _),) = pack_buckets(iter(weights()), 10**9)
    data = bucket.data.copy()
    data[5] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        WeightBucket(bucket.entries, data, bucket.checksum).tensors()


def test_read_only_bytes_give_writable_tensors():
    ((bucket, _),) = pack_buckets(iter(weights()), 10**9)
    bucket.data.flags.writeable = False
    tensor = bucket.tensors()[0][1]
    tensor.add_(1)
    assert not np.shares_memory(tensor.numpy(), bucket.data)


def test_other_processes_map_what_is_shared_and_keep_it():
    ((bucket, _),) = pack_buckets(iter(weights()), 10**9)
    with share_bucket(bucket) as shared:
        assert len(pickle.dumps(shared)) < 1000, "the bytes do not travel"
        copies = [pickle.loads(pickle.dumps(shared)).tensors() for _ in range(2)]
    copies[0][0][1].zero_()
    for (name, tensor), (want_name, want) in zip(copies[1], weights(), strict=True):
        assert name == want_name and torch.equal(tensor, want), "after the end, and whatever another wrote"
    with pytest.raises(FileNotFoundError):
        shared.tensors()


def test_shared_bytes_are_checked_where_they_are_read():
    ((bucket, _),) = pack_buckets(iter(weights()), 10**9)
    with (
        share_bucket(replace(bucket, checksum=bucket.checksum ^ 1)) as shared,
        pytest.raises(ValueError, match="checksum"),
    ):
        shared.tensors()
