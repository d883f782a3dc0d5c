"""The square of the video demo moves the way that the answer says, and no single frame tells which."""

from collections import Counter

import numpy as np


def find_cell(frame) -> tuple[int, int]:
    """Find the column and row of cells that the brightest pixels lie in."""
    from recipes.common.motion import CELL

    pixels = np.asarray(frame).sum(-1)
    y, x = np.unravel_index(pixels.argmax(), pixels.shape)
    return int(x) // CELL, int(y) // CELL


def test_the_square_moves_as_the_answer_says():
    from recipes.common.motion import CELL, FRAMES, SIDE, WAYS, draw_video

    generator, starts = np.random.default_rng(0), {way: Counter() for way in WAYS}
    for _ in range(400):
        frames, answer = draw_video(generator)
        cells = [find_cell(frame) for frame in frames]
        assert len(cells) == FRAMES
        for (x, y), after in zip(cells, cells[1:]):
            assert after == tuple((np.array([x, y]) + WAYS[answer]) % (SIDE // CELL))
        starts[answer][cells[0]] += 1
    assert all(len(cells) == (SIDE // CELL) ** 2 for cells in starts.values()), "each begins anywhere, whatever the way"
