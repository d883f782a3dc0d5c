"""The square of the video demo moves the way that the answer says, and no single frame tells which."""

from collections import Counter

import numpy as np


def find_corner(frame: np.ndarray) -> tuple[bool, bool]:
    """Find the half of the frame that its square is in: right of the middle, below it."""
    from recipes.common.motion import SIDE, SQUARE

    lit = (frame != np.median(frame, (0, 1))).any(-1)
    assert lit.sum() == SQUARE**2
    y, x = np.argwhere(lit).mean(0)
    return bool(x > SIDE / 2), bool(y > SIDE / 2)


def test_the_square_moves_as_the_answer_says():
    from recipes.common.motion import FRAMES, STEP, WAYS, draw_video

    generator, ways = np.random.default_rng(0), Counter()
    for _ in range(2000):
        frames, answer = draw_video(generator)
        assert len(frames) == FRAMES
        shown = [np.asarray(frame) for frame in frames]
        x, y = WAYS[answer]
        for before, after in zip(shown, shown[1:]):
            assert (after == np.roll(before, (STEP * y, STEP * x), (0, 1))).all()
        for number in (0, FRAMES - 1):
            ways[number, find_corner(shown[number]), answer] += 1
    assert len(ways) == 16, "of the first frame and of the last each corner leaves two ways"
    assert all(190 < count < 310 for count in ways.values()), "as often as each other"
