"""The report of a device check: a line for everything that was looked at, as a table and as JSON."""

import platform as machine
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hardware.platform import Platform, describe
from rlworker.checks.trainer import Finding

PACKAGES = ("torch", "megatron-core", "transformers", "numpy", "triton", "torch_npu")


@dataclass(frozen=True)
class DeviceFinding(Finding):
    """A line with its numbers.

    Attributes:
        figures: measurements, by a name that ends with its unit.
    """

    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """The device under check, and how lines about it are made."""

    platform: Platform
    device: torch.device

    @property
    def is_host(self) -> bool:
        """The device is the host's processor: of an emulator, or of the platform that has no other."""
        return self.device.type == torch.get_default_device().type

    def make_finding(
        self, check: str, where: str, passed: bool, text: str, figures: dict[str, float] | None = None
    ) -> DeviceFinding:
        """Make a line of the report, with the platform's evidence."""
        return DeviceFinding(check, where, "ok" if passed else "FAILED", text, self.platform.evidence, figures or {})

    def refuse(self, check: str, where: str, text: str) -> DeviceFinding:
        """Make a line about a check that was not run here, with the reason."""
        return DeviceFinding(check, where, "refused", text, "untested")

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if not self.is_host:
            torch.get_device_module(self.device).synchronize()

    def describe(self) -> dict[str, Any]:
        """Describe the device and the versions of its packages."""
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


def format_table(findings: Iterable[Finding]) -> str:
    """Format findings as a table, a line each."""
    rows = [("check", "where", "outcome", "evidence", "found")]
    rows += [(f.check, f.where, f.outcome, f.evidence, f.text) for f in findings]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths)), text]) for *cells, text in rows
    )


def build_report(device: Device, findings: list[DeviceFinding]) -> dict[str, Any]:
    """Build the content of ``--json``: device, versions, findings, and whether all of them passed."""
    passed = not any(finding.outcome == "FAILED" for finding in findings)
    return device.describe() | {"passed": passed, "findings": [asdict(finding) for finding in findings]}
