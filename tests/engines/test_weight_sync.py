import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.weight_sync import PieceJoiner, WeightBucket, pack_buckets, share_bucket


def weights():
    torch.manual_seed(0)
    tensors = torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(4, 4).t(), torch.randn(64)
    return list(zip("abcd", tensors, strict=True))


@pytest.mark.parametrize("bucket_bytes", [1, 7, 100, 10**9])
def test_what_is_packed_comes_out(bucket_bytes):
    """A tensor larger than a bucket too, so that none is larger than it may be."""
    buckets = list(pack_buckets(iter(weights()), bucket_bytes))
    assert [last for _, last in buckets] == [False] * (len(buckets) - 1) + [True]
    assert [bucket.first for bucket, _ in buckets] == [True] + [False] * (len(buckets) - 1)
    assert len(buckets) == {1: 60 + 14 + 64 + 256, 7: 9 + 2 + 10 + 37, 100: 5, 10**9: 1}[bucket_bytes]
    assert bucket_bytes == 10**9 or max(len(bucket.data) for bucket, _ in buckets) <= bucket_bytes
    joiner = PieceJoiner()
    out = [pair for bucket, _ in buckets if (whole := joiner.join(bucket)) for pair in whole.tensors()]
    for (name, tensor), (want_name, want) in zip(out, weights(), strict=True):
        assert name == want_name and tensor.dtype == want.dtype and torch.equal(tensor, want)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_piece_that_is_lost_is_missed(lost):
    pieces = [bucket for bucket, _ in pack_buckets(iter([("a", torch.arange(10.0))]), 8)]
    del pieces[lost]
    joiner = PieceJoiner()
    with pytest.raises(ValueError, match=rf"piece of 'a' came that begins at byte \d+, expected byte {8 * lost}"):
        [joiner.join(piece) for piece in pieces]


def test_a_flipped_bit_is_found():
    assert list(pack_buckets(iter([]), 100)) == []
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

    wrong = share_bucket(replace(bucket, checksum=bucket.checksum ^ 1))
    with wrong as shared, pytest.raises(ValueError, match="checksum"):
        shared.tensors()
