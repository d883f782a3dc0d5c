"""The device without numbers: operators run on fake tensors, collectives are noted, and values that are read are given.

It rests on parts of torch that are private and may change: ``_setup_privateuseone_for_python_backend``,
``FakeTensorMode`` and the process group ``fake``. They were seen to work with torch 2.13.0 and megatron-core 0.16.1.
A process that has the device keeps it, so a rank in shapes is a process of its own.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the process group "fake"
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hardware.megatron.shims import Runtime
from hardware.shapes.live_bytes import LiveBytes

DEVICE_TYPE = "shapes"
_aten: Any = torch.ops.aten
_GIVEN = {_aten.equal.default: True, _aten.is_nonzero.default: True}
"""Operator that reads values of tensors -> what it is told: that ranks agree, and that values are finite."""


def open_device() -> torch.device:
    """Register the device in this process, once and for all."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE)
    return torch.device(DEVICE_TYPE, 0)


def make_runtime(device: torch.device) -> Runtime:
    """Return what Megatron takes in place of ``torch.cuda``. Its random numbers are the host's, and nobody reads them.
    """
    seed = torch.manual_seed
    state = lambda *_, **__: torch.get_rng_state()  # noqa: E731
    return Runtime(device.type, lambda: device, lambda *_: None, state, torch.set_rng_state, seed)


class _Fakes(FakeTensorMode):
    """Torch's mode, which takes the device for one that does not start: a constant is then not copied to it."""

    avoid_device_init = property(lambda self: True)  # pyright: ignore[reportAssignmentType]  torch's is a property too


class ShapeMode(TorchDispatchMode):
    """Computes shapes, types and devices of every operator on the device, and the numbers of those on the host.

    A tensor of the host is real, except where it is copied from the device or made by ``make_on_host``.

    Attributes:
        live: bytes on the device. collectives: (name, ranks of its group) -> [number, bytes of this rank's tensors].
        operators: number of operators on the device.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.live, self.operators = device, LiveBytes(device), 0
        self.collectives: Counter[tuple[str, int]] = Counter()
        self.sent: Counter[tuple[str, int]] = Counter()
        self._fake = _Fakes(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def __enter__(self):
        # torch.tensor(..., device=) is otherwise copied to the device where no mode sees it.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def make_on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of the host that has no numbers either, such as one of a file that is not there."""
        with self._fake:
            return torch.empty(shape, dtype=dtype)

    def __torch_dispatch__(self, operator: Any, types, args=(), kwargs=None):
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if operator.overloadpacket in (_aten.pin_memory, _aten._pin_memory):
            return args[0]  # the host has no such memory
        if operator.namespace == "c10d":
            return self._communicate(operator, args)
        fakes = any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs)))
        target = kwargs.get("device")
        if not fakes and (target is None or torch.device(target).type != self.device.type):
            return operator(*args, **kwargs)
        if operator is _aten.is_set_to.default:
            return _is_same_view(*args)
        if operator in _GIVEN:
            return _GIVEN[operator]
        if operator is _aten._local_scalar_dense.default and args[0].constant is None:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1)
        if operator is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]  # from the device into real memory of the host
        self.operators += 1
        with self._fake:
            found = operator(*args, **kwargs)
        self.live.add(found)
        return found

    def _communicate(self, operator: Any, args: tuple) -> Any:
        """Note a collective or a message, and return what its operator does, which is over at once."""
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        groups = (each for each in args if isinstance(each, torch.ScriptObject))
        size = next(dist.ProcessGroup.unbox(each).size() for each in groups)
        key = operator.__name__.removesuffix(".default").rstrip("_"), size
        self.collectives[key] += 1
        self.sent[key] += max((each.nbytes for each in tensors), default=0)
        work = FakeWork().boxed()
        returned = [str(each.type) for each in operator._schema.returns]
        return work if len(returned) == 1 else (args[0], work)


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    places = [(each.storage_offset(), each.shape, each.stride()) for each in (one, other)]
    return same and places[0] == places[1]
