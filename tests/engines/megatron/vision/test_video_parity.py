"""Videos through Megatron against HuggingFace run one sequence at a time, in fp32, beside images and text."""

from itertools import product

import pytest
from support.cover import in_runs
from support.factors import IMAGE_EXPERT_FAMILIES, IMAGE_STATE_FAMILIES, LAYOUTS, SIZES, VIDEO_FAMILIES, parse_size
from support.models import make_vlm
from support.ranks.pool import draw_address
from support.ranks.vlm_cases import IMAGE_SIZES, make_images, make_videos, run_vlm_case
from support.ranks.vlm_parity import check_vlm_ranks, measure_vlm_rounding

SHORT, LONG, FILE = (len(IMAGE_SIZES) + number for number in range(3))
OTHERS = IMAGE_EXPERT_FAMILIES + IMAGE_STATE_FAMILIES
ROWS = ((SHORT,), (), (0, LONG), (FILE, 1, SHORT), (LONG,))
"""Text; a video by itself, and between images; one that lasts longer than it is wide, in two sequences."""
DEFAULT = [(VIDEO_FAMILIES[0], *case) for case in (("one", "thd"), ("TP2", "thd"), ("CP2", "bshd"))]
MORE = [
    *((VIDEO_FAMILIES[0], "PP2", "bshd"), (VIDEO_FAMILIES[0], "TP2-CP2", "thd")),
    *((family, *case) for family in OTHERS for case in (("TP2", "thd"), ("CP2", "bshd"))),
]
REST = [case for case in product((*VIDEO_FAMILIES, *OTHERS), SIZES, LAYOUTS) if case not in (*DEFAULT, *MORE)]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    return [*make_images(folder), *make_videos(folder)]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    return make_vlm(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(folder, shown):
    return measure_vlm_rounding(folder, shown, ROWS)


@pytest.mark.parametrize(("folder", "size", "layout"), in_runs(DEFAULT, MORE, REST), indirect=["folder"])
def test_parity(pool_of, folder, shown, reference, measured, size, layout):
    frozen = ("vision",) if layout == "bshd" else ()
    settings = parse_size(size) | {"layout": layout, "freeze": frozen, "budget": 1 if size == "TP2" else None}
    ranks = pool_of(size).run(run_vlm_case, draw_address(), folder, shown, settings, "cpu", ROWS)
    check_vlm_ranks(ranks, reference, measured, f"{size} {settings}", frozen)
