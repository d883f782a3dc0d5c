"""What the NPU platforms are made of beyond attention: names that exist, MindSpeed's place, errors."""

import sys
import types

import pytest
import torch

from engines.megatron.layout import Layout
from hardware.npu import mindspeed
from hardware.npu.platform import NpuPlatform
from hardware.platform import describe
from hardware.platforms import get_platform
from rlworker.checks.device.dense_attention import DIM


def test_a_pack_of_more_sequences_than_the_kernel_takes_is_refused():
    layout = Layout.build((1,) * 1025, "thd")
    platform = get_platform("npu-emulated")
    assert platform.max_pack_sequences == 1024
    with pytest.raises(ValueError, match="at most 1024 sequences in a pack, got 1025"):
        platform.build_attention_inputs(layout.build_mask_spec(), (torch.zeros(1, *layout.shape, DIM),) * 2)


@pytest.mark.parametrize("kind", ["bshd", "thd"])
def test_a_mask_does_not_grow_with_the_sequence(kind):
    """verl#7055: a causal mask of ``[s, s]`` in floats, made at every micro-batch, took the memory of the host."""
    masks = []
    for length in (16, 4096, 65536):
        layout = Layout.build((length, 3), kind)
        rotary = (torch.zeros(1, *layout.shape, DIM),) * 2
        inputs = get_platform("npu-emulated").build_attention_inputs(layout.build_mask_spec(), rotary)
        ((call,),) = inputs.plan.calls.values()
        masks.append(call.atten_mask)
    assert {(mask.dtype, mask.shape) for mask in masks} == {(torch.bool, (2048, 2048))}
    assert len({mask.data_ptr() for mask in masks}) == 1, "made once, whatever is attended"


def test_each_platform_says_what_it_shows():
    assert describe(get_platform("cpu")) == "cpu (executed)"
    assert describe(get_platform("npu")).startswith("npu (executed), on which no whole run was made before")
    assert describe(get_platform("npu-emulated")).startswith("npu-emulated (emulated), which says nothing about pse, ")
    assert describe(get_platform("cuda")).startswith("cuda (executed), on which no whole run was made before")
    assert describe(get_platform("cuda-emulated")).startswith("cuda-emulated (emulated), which says nothing about the ")
    with pytest.raises(ValueError, match=r"'tpu' is not available, expected one of \['cpu', .*'npu-emulated'\]"):
        get_platform("tpu")


@pytest.mark.skipif("torch_npu" in sys.modules, reason="there is one here")
def test_a_process_without_torch_npu_says_what_to_do():
    wanted = "needs torch_npu and CANN .* said: No module named 'torch_npu'; .*'npu-emulated', which runs the same code"
    with pytest.raises(RuntimeError, match=wanted):
        NpuPlatform().init_process(0)


# -- MindSpeed, which is no package of the registry: its two keepers of lengths are played here


@pytest.fixture
def keepers(monkeypatch):
    """Modules that keep a value as MindSpeed's do."""

    def keeper(name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.kept = "whatever was there"
        module.get_actual_seq_len = lambda: module.kept
        module.set_actual_seq_len = lambda value: setattr(module, "kept", value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return [keeper(name) for name in mindspeed.KEEPERS]


@pytest.mark.parametrize("cp", [1, 2])
def test_mindspeed_has_the_lengths_during_a_forward_and_not_after(keepers, cp):
    platform = get_platform("npu")
    layout = Layout.build((5, 2, 7), "thd", cp=cp)
    inputs = platform.build_attention_inputs(layout.build_mask_spec(), (torch.zeros(1, *layout.shape, DIM),) * 2)
    assert [keeper.kept for keeper in keepers] == ["whatever was there"] * 2, "packing does not touch them"
    ends = [5, 7, 14] if cp == 1 else [4, 6, 10]  # a rank's own slots: 8, 4 and 8 over two ranks
    with pytest.raises(KeyError), platform.wrap_forward(inputs):
        assert [keeper.kept.tolist() for keeper in keepers] == [ends] * 2
        raise KeyError
    assert [keeper.kept for keeper in keepers] == ["whatever was there"] * 2


def test_rows_leave_mindspeed_without_lengths(keepers):
    platform = get_platform("npu")
    layout = Layout.build((5, 2, 7), "bshd")
    inputs = platform.build_attention_inputs(layout.build_mask_spec(), (torch.zeros(1, *layout.shape, DIM),) * 2)
    with platform.wrap_forward(inputs):
        assert [keeper.kept for keeper in keepers] == [None, None]


def test_mindspeed_comes_before_megatron_or_not_at_all(monkeypatch):
    mindspeed.patch_megatron()  # nobody asked
    monkeypatch.setenv("RLWORKER_MINDSPEED", "1")
    with pytest.raises(RuntimeError, match="asks for MindSpeed, which is not installed"):
        mindspeed.patch_megatron()
    monkeypatch.setattr(mindspeed.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.delitem(sys.modules, "mindspeed.megatron_adaptor", raising=False)
    with pytest.raises(RuntimeError, match=r"megatron was imported before mindspeed\.megatron_adaptor"):
        mindspeed.patch_megatron()
