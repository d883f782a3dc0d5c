"""Shared memory that vLLM's processes leave, by the names that versions give it."""

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from engines.vllm.processes import unlink_shared_memory


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
@pytest.mark.parametrize(
    ("name", "is_vllms"),
    [
        ("vllm_dist_{}-tp:0-[0-1]-cpushm_0", True),  # 0.32
        ("{}-tp:0-[0-1]-cpushm_1", True),  # 0.23 and 0.26
        ("{}-another", False),
    ],
)
def test_buffers_of_collectives_lose_their_names(name, is_vllms):
    path = Path("/dev/shm", name.format(os.getpid()))
    path.write_bytes(bytes(4096))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
            unlink_shared_memory()
            mapped[0] = 1
        assert path.exists() != is_vllms
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
