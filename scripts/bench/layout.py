"""Compare packing a micro-batch through one index map with a plain loop over its sequences.

    python scripts/bench/layout.py [--tiny] [--json FILE]

512 sequences of log-normal length (median 128, at most 1024); eight columns are packed and two unpacked, building the
map included. The bandwidth is that of a copy of as many bytes as the columns hold, in the same run.
"""

import numpy as np
import torch
from timing import make_parser, measure_ms, write_figures

from engines.megatron.layout import Layout

OPTIONS = make_parser(__doc__).parse_args()
SEQUENCES, ROUNDS = (8, 1) if OPTIONS.tiny else (512, 15)
COLUMNS, RESULTS = 8, 2


def draw_lengths() -> tuple[int, ...]:
    """Draw the lengths ``[SEQUENCES]`` of the sequences, in tokens."""
    lengths = np.random.default_rng(0).lognormal(np.log(128), 0.8, SEQUENCES)
    return tuple(int(n) for n in lengths.clip(1, 1024))


def pack_by_map(lengths, kind: str, cp: int, columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pack columns ``[N]`` and unpack the first as the engine does: an index map, a scatter or gather for each."""
    layout = Layout.build(lengths, kind, cp=cp)
    packed = [layout.pack(column) for column in columns]
    return [layout.unpack(column) for column in packed[:RESULTS]]


def pack_by_loop(lengths, kind: str, cp: int, columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Do the same one sequence at a time: pad, cut into chunks, take those of the first rank, and back."""
    unit = 2 * cp if cp > 1 else 1
    longest = max(lengths)
    sizes = [-(-(longest if kind == "bshd" else n) // unit) * unit for n in lengths]
    packed = []
    for column in columns:
        rows = []
        for sequence, size in zip(column.split(lengths), sizes):
            row = torch.nn.functional.pad(sequence, (0, size - len(sequence)))
            chunks = row.chunk(2 * cp) if cp > 1 else [row]
            rows.append(torch.cat([chunks[0], chunks[-1]]) if cp > 1 else row)
        packed.append(torch.stack(rows) if kind == "bshd" else torch.cat(rows)[None])
    results = []
    for column in packed[:RESULTS]:
        flat, start = torch.zeros(sum(lengths), dtype=column.dtype), 0
        local = column if kind == "bshd" else column[0].split([size // cp for size in sizes])
        for i, (n, size) in enumerate(zip(lengths, sizes)):
            chunk = size // (2 * cp) if cp > 1 else size
            low = min(chunk, n)
            flat[start : start + low] = local[i][:low]
            high = max(0, n - (size - chunk)) if cp > 1 else 0
            if high:
                flat[start + size - chunk : start + n] = local[i][chunk : chunk + high]
            start += n
        results.append(flat)
    return results


def main() -> None:
    torch.set_num_threads(1)
    lengths = draw_lengths()
    tokens = sum(lengths)
    integers = [torch.randint(0, 1000, (tokens,)) for _ in range(4)]
    columns = [torch.rand(tokens) for _ in range(4)] + integers
    print(f"{SEQUENCES} sequences, {tokens} tokens, {COLUMNS} columns in, {RESULTS} out, one thread")
    rows = []
    for kind in ("thd", "bshd"):
        for cp in (1, 4):
            map_results, loop_results = (f(lengths, kind, cp, columns) for f in (pack_by_map, pack_by_loop))
            assert all(torch.equal(a, b) for a, b in zip(map_results, loop_results, strict=True))
            slots = Layout.build(lengths, kind, cp=cp).valid.numel()
            # Read and written: the columns that go in and the results that come out.
            moved_bytes = 2 * slots * sum(c.element_size() for c in columns + columns[:RESULTS])
            source = torch.zeros(moved_bytes // 2, dtype=torch.uint8)
            map_ms, loop_ms, copy_ms = measure_ms(
                lambda k=kind, c=cp: pack_by_map(lengths, k, c, columns),
                lambda k=kind, c=cp: pack_by_loop(lengths, k, c, columns),
                lambda s=source: s.clone(),
                rounds=ROUNDS,
            )
            print(
                f"{kind:4s} cp={cp}  ours {map_ms:6.2f} ms  loop {loop_ms:7.2f} ms  "
                f"loop over ours {loop_ms / map_ms:5.1f}  "
                f"copy of the bytes {copy_ms:5.2f} ms  ours over copy {map_ms / copy_ms:4.1f}"
            )
            row = {"layout": kind, "CP": cp, "ours ms": map_ms, "loop ms": loop_ms, "loop over ours": loop_ms / map_ms}
            rows.append(row | {"copy of the bytes ms": copy_ms, "ours over copy": map_ms / copy_ms})
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
