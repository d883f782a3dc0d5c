"""Places of sequences that are laid end to end, by hand."""

import numpy as np

from engines.batch.places import count_up, drop_firsts, drop_lasts, find_tokens


def test_places_by_hand():
    sizes, stream = np.array([2, 1, 3]), np.array([10, 11, 20, 30, 31, 32])
    assert drop_firsts(stream, sizes).tolist() == [11, 31, 32]
    assert drop_lasts(stream, sizes).tolist() == [10, 30, 31]
    table = np.stack([stream, -stream], axis=1)
    assert drop_firsts(table, sizes).tolist() == [[11, -11], [31, -31], [32, -32]]
    assert drop_lasts(table, sizes).tolist() == [[10, -10], [30, -30], [31, -31]]
    assert count_up(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2] and count_up(np.array([0])).tolist() == []
    assert count_up(np.array([0, 2, 0, 2, 0]), np.array([9, 5, 9, 1, 9])).tolist() == [5, 6, 1, 2]
    assert find_tokens([2, 3, 1], np.array([2, 0])).tolist() == [5, 0, 1]
    assert find_tokens([2, 0, 1], np.array([1, 0, 0])).tolist() == [0, 1, 0, 1]
