"""The square of the video demo moves the way that the answer says, and no single frame tells which."""

import numpy as np


def test_the_square_moves_as_the_answer_says():
    from recipes.common.motion import FRAMES, SIDE, SQUARE, WAYS, draw_video

    generator, seen = np.random.default_rng(0), {way: np.zeros((SIDE, SIDE)) for way in WAYS}
    for _ in range(2000):
        frames, answer = draw_video(generator)
        assert len(frames) == FRAMES
        shown = [np.asarray(frame) for frame in frames]
        x, y = WAYS[answer]
        for before, after in zip(shown, shown[1:]):
            assert (after == np.roll(before, (y, x), (0, 1))).all()
        lit = (shown[0] != np.median(shown[0], (0, 1))).any(-1)
        assert lit.sum() == SQUARE**2
        seen[answer] += lit
    # Wherever a square may be it is as often, whatever the way: 500 videos of each light a pixel 16 times.
    assert all(abs(lit.mean() - 500 * SQUARE**2 / SIDE**2) < 1.5 and lit.min() > 0 for lit in seen.values())
