"""Check the requirements of an attention kernel, each by a call that breaks it and a call that keeps it."""

from typing import Any

from hardware.attention.contract import KernelContract, RefusedError, Requirement, SilentError
from rlworker.checks.device.report import Device, DeviceFinding


def check_contract(device: Device) -> list[DeviceFinding]:
    """Test every requirement of the platform's kernel; empty on a platform without a contract, the CPU.

    An emulator must raise at every broken call, by the kind of error that the requirement states. A device must raise
    where the requirement says that it refuses, and compute where it says that it is silent. Where only the
    documentation forbids a call, the finding says which of the two happened.
    """
    kernel, findings = device.platform.build_contract(device.device), []
    if kernel is None:
        return []
    for requirement in kernel.requirements:
        broken, kept = kernel.examples[requirement.name]
        raised, error = _attend(device, kernel, broken), _attend(device, kernel, kept)
        passed = _is_as_stated(device, requirement, raised) and error is None
        text = f"broken: {_describe(raised)}, stated: {requirement.consequence}; kept: {_describe(error)}"
        findings.append(device.make_finding("contract", requirement.name, passed, text))
    return findings


def _attend(device: Device, kernel: KernelContract, arguments: dict[str, Any]) -> Exception | None:
    """Make a call, wait for the device, and return the exception, or None."""
    try:
        kernel.attend(**arguments)
        device.synchronize()
    except Exception as error:
        return error
    return None


def _is_as_stated(device: Device, requirement: Requirement, raised: Exception | None) -> bool:
    if isinstance(raised, SilentError | RefusedError):  # the emulator's
        return isinstance(raised, SilentError) == requirement.silent
    if device.is_host:  # torch's own Python found it before the emulator, or the device is the only one there is
        return raised is not None and not requirement.silent
    if requirement.silent:
        return raised is None
    return raised is not None or not requirement.source.refuses


def _describe(raised: Exception | None) -> str:
    return f"{type(raised).__name__}" if raised else "computed"
