"""Images seen both ways through vLLM's own CPU kernel, asked directly, against who may see whom in a plain loop."""

import pytest
import torch
from support.rounding import Draw, check_distances, measure_rounding

from hardware.attention.rules import Rule

pytestmark = pytest.mark.large  # it imports vLLM, which takes as long as twenty tests of masks
HEADS, GROUPS, DIM, BLOCK = 4, 2, 32, 128
LENGTHS = (30, 9, 50)
"""Tokens of each request."""
IMAGES = {0: [(3, 6), (7, 18)], 1: [], 2: [(0, 11), (30, 41)]}
"""Request -> first and last position of each image: side by side, none, and one that begins a prompt."""


def see(query: int, key: int, window: int | None, images: list[tuple[int, int]]) -> bool:
    same = any(first <= query <= last and first <= key <= last for first, last in images)
    return (key <= query or same) and (window is None or query - key < window)


@pytest.mark.parametrize("start", [0, 3, 5, 19, 40])
def test_runs_are_those_of_a_loop(start):
    """Whatever part of a prompt is scheduled, its images whole: also where the head of one lies in the cache."""
    from hardware.cpu.image_rule import cut_runs

    for request, images in IMAGES.items():
        for stop in range(start, 50):
            if any(first < stop <= last for first, last in images):
                continue
            runs = cut_runs(request, start, stop, images)
            assert [p for run in runs for p in range(run.start, run.stop)] == list(range(start, stop))
            for run in runs:
                for query in range(run.start, run.stop):
                    keys = {key for key in range(run.stop) if not run.causal or key <= query}
                    assert keys == {key for key in range(50) if see(query, key, None, images)}
    assert [run.causal for run in cut_runs(0, 5, 5, [])] == [True], "a request without tokens is one all the same"


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (0, 18), (8, 12), (18, 18)])
def test_a_cut_image_is_refused(start, stop):
    from hardware.cpu.image_rule import cut_runs

    if start == stop:
        assert len(cut_runs(0, start, stop, [(7, 18)])) == 1
        return
    with pytest.raises(RuntimeError, match=r"the image at positions 3 to 6|the image at positions 7 to 18.* is cut by"):
        cut_runs(0, start, stop, IMAGES[0])


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("window", [None, 12, 24])
@pytest.mark.parametrize("starts", [(0, 0, 0), (19, 4, 12)], ids=["whole prompts", "after what is cached"])
def test_the_kernel_computes_the_rule(measured, isa, window, starts):
    """No image is longer than a window, as with every model that is built."""
    outputs = run_kernel(isa, window, starts, IMAGES)
    want = measure_rounding(attend_requests, window, starts, IMAGES, folder=None)
    check_distances({"outputs": want.compare("outputs", outputs)}, measured, f"{isa} {window} {starts}")


def test_the_kernel_closes_both_sides_of_a_longer_image():
    """Why a model whose images are longer than its window is refused: were it mended upstream, this would fail."""
    outputs, want = run_kernel("vec", 5, (0, 0, 0), IMAGES), attend_requests(Draw(), 5, (0, 0, 0), IMAGES)["outputs"]
    assert max(float((outputs[name] - tensor).abs().max()) for name, tensor in want.items()) > 1e-2
    assert Rule(images=True, window=5).extras == ("window", "images")


def draw_requests() -> list[list[torch.Tensor]]:
    """Draw queries, keys and values ``[n, heads, DIM]`` of each request."""
    generator = torch.Generator().manual_seed(0)
    counts = (HEADS, GROUPS, GROUPS)
    return [[torch.randn(n, heads, DIM, generator=generator) for heads in counts] for n in LENGTHS]


def attend_requests(draw: Draw, window: int | None, starts: tuple[int, ...], images: dict) -> dict:
    """Compute each request's outputs by hand, of the tokens from ``starts`` on."""
    requests, outputs = draw_requests(), {}
    with draw.computing(), torch.no_grad():
        for request, start in enumerate(starts):
            numbers = draw.move(dict(zip("qkv", requests[request], strict=True)))
            outputs[str(request)] = attend(*numbers.values(), window, images[request])[start:]
        return {"outputs": outputs}


def run_kernel(isa: str, window: int | None, starts: tuple[int, ...], images: dict) -> dict[str, torch.Tensor]:
    """Compute each request's outputs by vLLM's kernel, of the tokens from ``starts`` on."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from hardware.cpu.image_rule import list_runs, replace_requests

    lengths, drawn = LENGTHS, draw_requests()
    cache = torch.zeros(4, GROUPS, BLOCK * 2, DIM)
    keys, values = cache.chunk(2, dim=2)
    for request, (_, key, value) in enumerate(drawn):
        slots = torch.arange(lengths[request]) + BLOCK * (request + 1)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
    counts = torch.tensor([0, *(n - start for n, start in zip(lengths, starts))])
    first = counts.cumsum(0).to(torch.int32)
    sizes = dict(num_reqs=3, num_actual_tokens=int(counts.sum()), max_query_len=int(counts.max()))
    whole = CommonAttentionMetadata(
        query_start_loc=first,
        query_start_loc_cpu=first,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor([[1], [2], [3]], dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.long),
        mm_req_doc_ranges=images,
        **sizes,
    )
    told = replace_requests(whole, list_runs(whole))
    sequences = dict(query_start_loc=told.query_start_loc, seq_lens=told.seq_lens, dynamic_causal=told.causal)
    reach = -1 if window is None else window
    sizes = dict(num_reqs=told.num_reqs, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM, dtype=torch.float32)
    how = dict(causal=False, sliding_window_size=reach, isa=isa, enable_kv_split=True)
    plan = ops.cpu_attn_get_scheduler_metadata(**sizes, **how, **sequences)
    query = torch.cat([parts[0][start:] for parts, start in zip(drawn, starts)])
    output = torch.empty_like(query)
    tensors = dict(query=query, key_cache=keys, value_cache=values, output=output, block_table=told.block_table_tensor)
    how = dict(scale=DIM**-0.5, causal=False, alibi_slopes=None, sliding_window=reach, softcap=0, s_aux=None)
    ops.cpu_attention_with_kv_cache(**tensors, **how, scheduler_metadata=plan, **sequences)
    outputs = output.split([n - start for n, start in zip(lengths, starts)])
    return {str(request): tensor for request, tensor in enumerate(outputs)}


def attend(query, key, value, window: int | None, images: list[tuple[int, int]]) -> torch.Tensor:
    """Attention by hand: ``[n, heads, dim]``."""
    n = len(query)
    mask = torch.tensor([[see(q, k, window, images) for k in range(n)] for q in range(n)])
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)
