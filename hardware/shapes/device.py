"""The device without numbers: operators run on fake tensors, collectives are noted, and values that are read are given.

It rests on parts of torch that are private and may change: ``_setup_privateuseone_for_python_backend``,
``FakeTensorMode``, the flag ``_set_only_lift_cpu_tensors`` and the process group ``fake``. They were seen to work with
torch 2.13.0 and megatron-core 0.16.1. A process that has the device keeps it, so it is of no other use.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hardware.megatron.kernel_memory import KernelMemory
from hardware.megatron.shims import Runtime
from hardware.shapes.calls import Call, describe_call
from hardware.shapes.kernels import count_flops, count_inside, fuse_kernels
from hardware.shapes.live_bytes import LiveBytes

DEVICE_TYPE = "shapes"
_aten: Any = torch.ops.aten


def open_device() -> tuple[torch.device, Runtime]:
    """Register the device in this process, once and for all, and for torch's process group ``fake``.

    Returns:
        the device, and the functions that Megatron calls in place of ``torch.cuda``. Random numbers are the host's, and
        nobody reads them.
    """
    backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Module())
    dist.Backend.backend_capability["fake"].append(DEVICE_TYPE)
    device = torch.device(DEVICE_TYPE, 0)
    get_state = lambda *_, **__: torch.get_rng_state()  # noqa: E731
    set_seed = lambda *_: torch.manual_seed(0)  # noqa: E731
    return device, Runtime(device.type, lambda: device, lambda *_: None, get_state, torch.set_rng_state, set_seed)


class _Module(backend_registration._DummyBackendModule):
    """Torch's module of functions of the device. Recomputation asks for the types of autocast, which nothing uses."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class _Fakes(FakeTensorMode):
    """Torch's mode, which takes the device for one that does not start, and so copies no constant to it."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class ShapeMode(TorchDispatchMode):
    """Computes shape, type and device of every operator's outputs on the device, and the numbers of those on the host.

    A tensor of the host is real, except where it is copied from the device or made under ``on_host``. What reads a
    value from the device gets those of ``give`` in order, then True, 1 or 1.0.

    Attributes:
        live: bytes on the device. on_host: context in which tensors of the host have no numbers either, such as those
            of a file that is not there. operators: number of operators there.
        flops: of matrix products, convolutions and attention there (``count_flops``).
        calls: collectives and messages, in their order.
    """

    def __init__(self, device: torch.device, memory: KernelMemory):
        super().__init__()
        self.device, self.live, self.operators = device, LiveBytes(device), 0
        self.flops, self.calls = 0, list[Call]()
        self._memory, self._given = memory, deque[int]()
        self.on_host = _Fakes(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._library = fuse_kernels(memory.fuses_norms)

    def __enter__(self) -> "ShapeMode":
        # torch.tensor(..., device=) is otherwise copied to the device where no mode sees it.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def give(self, values: Iterable[int]) -> None:
        """Give the values that are read next from the device."""
        self._given.extend(values)

    def __torch_dispatch__(self, operator: Any, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)  # memory of the host that takes numbers of the device
        if operator.overloadpacket in (_aten.pin_memory, _aten._pin_memory):
            return args[0]  # the host has no such memory
        if operator.namespace == "c10d":
            self.calls.append(describe_call(operator, args))
            work = FakeWork().boxed()  # a collective or a message is over at once
            return work if len(operator._schema.returns) == 1 else (args[0], work)
        is_fake = is_pinned or any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs)))
        target = kwargs.get("device")
        if not is_fake and (target is None or torch.device(target).type != self.device.type):
            return operator(*args, **kwargs)
        if operator is _aten._local_scalar_dense.default and args[0].constant is None:
            return self._read(args[0].dtype)
        if operator is _aten.equal.default:
            return True
        if operator is _aten.is_set_to.default:
            one, other = (
                (each.untyped_storage()._cdata, each.storage_offset(), each.shape, each.stride()) for each in args
            )
            return one == other
        if operator is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]  # numbers that are not there, into real memory of the host
        self.operators += 1
        with self.on_host:
            found = operator(*args, **kwargs)
        self.flops += count_flops(operator, args, kwargs, found)
        self.live.add(found, count_inside(operator, args, self._memory))
        return found

    def _read(self, dtype: torch.dtype) -> bool | int | float:
        if dtype == torch.bool:
            return True
        if dtype.is_floating_point:
            return 1.0
        return self._given.popleft() if self._given else 1
