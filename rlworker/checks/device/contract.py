"""Requirements of an attention kernel, each tried by a call that breaks it and one that keeps it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hardware.attention.contract import RefusedError, Requirement, SilentError
from rlworker.checks.device.report import Device, DeviceFinding


@dataclass(frozen=True)
class Kernel:
    """An attention kernel and what it is asked.

    Attributes:
        examples: requirement -> arguments of a call that breaks it, and of one that keeps it.
        attend: makes a call; the output.
    """

    requirements: tuple[Requirement, ...]
    examples: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    attend: Callable[..., Tensor]


def _build_varlen(device: torch.device) -> Kernel:
    import inspect

    from torch.nn.attention import varlen

    from hardware.cuda.emulator import contract, examples
    from hardware.cuda.kernel_call import Call

    asks_for_groups = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters

    def attend(**arguments: Any) -> Any:
        if any(isinstance(x, Tensor) and x.is_meta for x in arguments.values()):
            contract.check(Call(**arguments))  # a CPU's other device has shapes alone, and no kernel is asked there
        grouped = arguments["query"].shape[1] != arguments["key"].shape[1]
        return varlen.varlen_attn(**arguments, **{"enable_gqa": grouped} if asks_for_groups else {})

    right = examples.make_example_call(device)
    calls = {name: (right | broken, right | kept) for name, (broken, kept) in examples.make_examples(device).items()}
    return Kernel(contract.REQUIREMENTS, calls, attend)


def _build_npu(device: torch.device) -> Kernel:
    from hardware.npu.emulator import contract, examples

    def attend(**arguments: Any) -> Any:
        return torch.ops.npu.npu_fusion_attention(**arguments)[0]

    calls = {
        name: (examples.make_example_call(device, **broken), examples.make_example_call(device, **kept))
        for name, (broken, kept) in examples.make_examples().items()
    }
    return Kernel(contract.REQUIREMENTS, calls, attend)


_KERNELS = {"cuda": _build_varlen, "npu": _build_npu}


def check_contract(device: Device) -> list[DeviceFinding]:
    """Try every requirement of the platform's kernel; nothing on a platform without a contract, the CPU.

    An emulator raises at every broken call, by the kind of error that the requirement says. A device raises where the
    requirement says that it refuses, and computes something where it says that it is silent. Where only the
    documentation forbids a call, the line says which of the two it did.
    """
    build = _KERNELS.get(device.platform.name.removesuffix("-emulated"))
    if build is None:
        return []
    kernel, findings = build(device.device), []
    for requirement in kernel.requirements:
        broken, kept = kernel.examples[requirement.name]
        raised, error = _attend(device, kernel, broken), _attend(device, kernel, kept)
        passed = _is_as_stated(device, requirement, raised) and error is None
        text = f"broken: {_describe(raised)}, stated: {requirement.consequence}; kept: {_describe(error)}"
        findings.append(device.make_finding("contract", requirement.name, passed, text))
    return findings


def _attend(device: Device, kernel: Kernel, arguments: dict[str, Any]) -> Exception | None:
    """Make a call, wait for it, and return what it raised."""
    try:
        kernel.attend(**arguments)
        device.synchronize()
    except Exception as error:
        return error
    return None


def _is_as_stated(device: Device, requirement: Requirement, raised: Exception | None) -> bool:
    if device.is_emulated:
        return _is_emulated_as_stated(requirement, raised)
    if requirement.silent:
        return raised is None
    return raised is not None or not requirement.source.refuses


def _is_emulated_as_stated(requirement: Requirement, raised: Exception | None) -> bool:
    """Some calls never get to the emulator: torch's own Python finds them, or the device is the only one there is."""
    if isinstance(raised, SilentError | RefusedError):
        return isinstance(raised, SilentError) == requirement.silent
    return raised is not None and not requirement.silent


def _describe(raised: Exception | None) -> str:
    return f"{type(raised).__name__}" if raised else "computed"
