"""What the CUDA platforms are made of beyond attention: what they refuse, their processes, their settings."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from support.ranks.engines_cases import join_group, leave_groups, start_process
from support.ranks.pool import draw_address

from engines.config import MegatronConfig
from engines.megatron.layout import Layout
from hardware.attention.rules import Rule
from hardware.collectives import refuse_shared_devices
from hardware.cuda.platform import CudaPlatform
from hardware.megatron import shims as megatron_shims
from hardware.platform import list_ray_resources
from hardware.platforms import get_platform
from hardware.transfer import to_device


@pytest.fixture
def card(monkeypatch):
    """One H100 and a torch for it, as torch reports them. A dict of what else it may report."""
    reported = {"count": 1, "capability": (9, 0), "flash": True, "error": None}

    def init():
        if reported["error"]:
            raise RuntimeError(reported["error"])

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: reported["count"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: reported["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "the card")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: reported.update(taken=device))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: reported["flash"])
    monkeypatch.setattr(megatron_shims, "install", lambda runtime: reported.update(runtime=runtime))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    return reported


def test_a_process_takes_its_card(card):
    assert CudaPlatform().init_process(3) == torch.device("cuda", 0)
    assert (card["taken"], card["runtime"]) == (0, None) and not torch.backends.cudnn.allow_tf32


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ({"capability": (7, 5)}, "the card has compute capability 7.5, and the attention kernels need 8.0"),
        ({"flash": False}, "built without flash attention, .* requirements/cuda.txt"),
        ({"error": OLD_DRIVER}, r"too old \(found version 11040\).*built for CUDA 13.0, .*update the driver"),
        ({"error": "No CUDA GPUs are available"}, "did not start: No CUDA GPUs are available; .* needs a GPU"),
        ({"count": 2}, "must see exactly one GPU, its own, and sees 2; .*CUDA_VISIBLE_DEVICES"),
        ({"count": 0}, "must see exactly one GPU, its own, and sees 0"),
    ],
    ids=["below sm80", "no flash kernel", "old driver", "no card", "two cards", "none left"],
)
def test_a_card_that_will_not_do_is_refused_before_megatron_is_there(card, reports, said):
    card |= reports
    with pytest.raises(RuntimeError, match=f"^platform: .*{said}"):
        CudaPlatform().init_process(0)
    assert "runtime" not in card and "taken" not in card


def test_a_torch_without_the_operator_is_refused(card, monkeypatch):
    def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError

    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", of_2_10)
    with pytest.raises(RuntimeError, match=r"has no scale and no window_size in torch.nn.attention.varlen, .*2.11"):
        CudaPlatform().init_process(0)
    monkeypatch.delattr(varlen, "varlen_attn")
    with pytest.raises(RuntimeError, match=r"has no varlen_attn in"):
        CudaPlatform().init_process(0)
    assert "runtime" not in card


def test_a_torch_for_cpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"needs a torch that was built for CUDA, .* or take 'cuda-emulated'"):
        CudaPlatform().init_process(0)


def share(rank, world, address, keys):
    group = join_group(rank, world, address)
    try:
        refuse_shared_devices(keys[rank], group)
    except RuntimeError as error:
        return str(error)


def test_two_ranks_on_one_device_are_refused(two_ranks):
    for keys in (("GPU-1", "GPU-2"), (None, None)):
        assert two_ranks.run(share, draw_address(), keys) == [None, None]
    said = two_ranks.run(share, draw_address(), ("GPU-1", "GPU-1"))
    wanted = "platform: ranks [0, 1] of 2 share devices (GPU-1), and each needs its own; lower --actor.ranks"
    assert all(text.startswith(wanted) for text in said)


def test_an_engine_asks_for_shared_devices_before_it_builds(two_ranks):
    def start(rank, world, address):

        from engines.megatron.groups import init_distributed

        platform = start_process(rank)
        leave_groups()
        with patch.object(type(platform), "get_device_key", lambda self: "GPU-1"):
            try:
                init_distributed(platform, MegatronConfig(ranks=world, timeout_s=60), rank, address, seed=1)
            except RuntimeError as error:
                return str(error)
            finally:
                leave_groups()

    assert all("share devices (GPU-1)" in text for text in two_ranks.run(start, draw_address()))


def test_only_what_cuda_needs_is_patched(monkeypatch):
    applied = []
    noting = [replace(shim, apply=lambda _, name=shim.name: applied.append(name)) for shim in megatron_shims.SHIMS]
    monkeypatch.setattr(megatron_shims, "SHIMS", tuple(noting))
    with patch.object(megatron_shims, "import_megatron") as imported, patch.dict(megatron_shims.INSTALLED, clear=True):
        megatron_shims.install(None)
        assert applied == ["adam", "gradient_norm"] and imported.call_args.kwargs == {"with_compile": True}
        applied.clear()
        megatron_shims.install(megatron_shims.CPU)
        assert len(applied) == len(noting) and imported.call_args.kwargs == {"with_compile": False}


def test_ray_sets_a_device_aside_for_each_actor():
    assert list_ray_resources(get_platform("cuda")) == {"CPU": 1, "GPU": 1}
    assert list_ray_resources(get_platform("npu")) == {"CPU": 1, "NPU": 1}
    assert list_ray_resources(get_platform("cuda-emulated")) == {"CPU": 1}


def test_settings_of_a_process_may_be_given(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    train, rollout = get_platform("cuda").get_train_env(), get_platform("cuda").get_rollout_env()
    assert train["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" and "PYTORCH_CUDA_ALLOC_CONF" not in rollout
    assert train["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert get_platform("cuda").get_train_env()["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"


def test_what_goes_to_a_device_is_pinned_and_not_waited_for(monkeypatch):
    """The device is torch's that holds nothing; what it is told is noted."""
    told, move = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: told.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kw: told.append(kw) or move(self, *args, **kw))
    source = torch.arange(3)
    assert to_device(source.numpy(), "meta").device.type == "meta"
    assert told == ["pinned", {"non_blocking": True}]
    told.clear()
    assert to_device(source, torch.device("cpu")) is source and "pinned" not in told


def test_a_plan_travels_so(monkeypatch):
    """Every tensor of it: none is left behind, and none is waited for."""
    moved, move = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kw: moved.append(kw) or move(self, *args, **kw))
    lengths, rules = (16, 16, 9), (Rule(images=True, window=3), Rule(window=3), Rule(causal=False))
    blocks = torch.tensor([number for n in lengths for number in [0] * 5 + [-1] * 4 + [1] * (n - 9)])
    layout = Layout.build(lengths, "thd", cp=2, device="meta")
    assert layout.slots.device.type == "meta"
    for dtype in (torch.bfloat16, torch.float32):
        rotary = (torch.zeros(1, *layout.shape, 8, dtype=dtype, device="meta"),) * 2
        plan = CudaPlatform().build_attention_inputs(layout.build_mask_spec(rules, blocks), rotary).plan
        tensors = list(_tensors(plan))
        assert len(tensors) > 5 and {x.device.type for x in tensors} == {"meta"}
    assert moved and all(each == {"non_blocking": True} for each in moved)


def _tensors(plan):
    if isinstance(plan, torch.Tensor):
        yield plan
    for part in plan.values() if isinstance(plan, dict) else plan if isinstance(plan, tuple) else ():
        yield from _tensors(part)
    if hasattr(plan, "__dataclass_fields__"):
        for part in vars(plan).values():
            yield from _tensors(part)
