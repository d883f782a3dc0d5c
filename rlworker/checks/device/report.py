"""The report of a device check: one row for each thing that was checked, as a table and as JSON."""

import platform as machine
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hardware.platform import Platform, describe
from rlworker.base.findings import Finding

PACKAGES = ("torch", "megatron-core", "transformers", "numpy", "triton", "fla-core", "tilelang", "torch_npu")

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Part of a card's name -> dense bf16 TFLOP/s (the vendors' data sheets)."""


@dataclass(frozen=True)
class DeviceFinding(Finding):
    """A row of the report with numbers.

    Attributes:
        figures: measured numbers, by names that end with the unit.
    """

    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """The device under check. It makes the findings of the report.

    Attributes:
        platform: the platform. device: torch's device.
    """

    platform: Platform
    device: torch.device

    @property
    def is_host(self) -> bool:
        """Tell whether the device is the host's processor, as on an emulator or a platform without devices."""
        return self.device.type == torch.get_default_device().type

    def make_finding(
        self, check: str, where: str, passed: bool, text: str, figures: dict[str, float] | None = None
    ) -> DeviceFinding:
        """Return a row of the report, with the platform's level of proof as evidence.

        Args:
            check: name of the check. where: the case that was checked, such as a rule and a dtype.
            passed: whether the outcome is "ok", else "FAILED". text: the result in words.
            figures: name with unit -> measured number.
        """
        return DeviceFinding(check, where, "ok" if passed else "FAILED", text, self.platform.evidence, figures or {})

    def refuse(self, check: str, where: str, text: str) -> DeviceFinding:
        """Return a row for a check that was not run; ``text`` gives the reason."""
        return DeviceFinding(check, where, "refused", text, "untested")

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        if not self.is_host:
            torch.get_device_module(self.device).synchronize()

    def describe(self) -> dict[str, Any]:
        """Return ``platform``, ``device`` and ``versions`` of the libraries, for the report."""
        name = machine.processor() or machine.machine()
        if not self.is_host:
            name = torch.get_device_module(self.device).get_device_name(self.device)
        versions = {"python": machine.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                continue
        return {"platform": describe(self.platform), "device": name, "versions": versions}


def build_report(device: Device, findings: list[DeviceFinding]) -> dict[str, Any]:
    """Build the report for ``--json``: device, versions, findings, and ``passed``, whether no finding failed."""
    passed = not any(finding.outcome == "FAILED" for finding in findings)
    return device.describe() | {"passed": passed, "findings": [asdict(finding) for finding in findings]}
