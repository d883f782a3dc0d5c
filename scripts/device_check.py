"""Check one device with everything that this project computes on it: attention, its kernel's contract, a tiny engine.

    python scripts/device_check.py --platform cuda [--only attention,contract] [--model FOLDER] [--json FILE]

It needs torch, megatron-core and transformers with what they bring, Pillow, psutil and annotated-types; for images
torchvision. It needs no Ray, vLLM or tyro. On a CPU it runs through an emulator: --platform cuda-emulated or
npu-emulated. Each line says what it shows: *executed* on the device that is named, or *emulated*. Exit status 1 where
a line failed, 2 where the device or a package is not there.

Parts:
    attention  every rule x layout x context-parallel size against dense attention, fp32 and bf16, gradients too
    engine     tiny models, text and images, or --model, against HuggingFace in float64 one sequence at a time
    memory     the peak of a training step beside the plan; on a CPU what autograd keeps
    reads      the places where a training step waits for the device
    speed      times and TFLOP/s of attention and of a step of --model, beside SDPA's and a matrix product's
    contract   every requirement of the kernel, by a call that breaks it and one that keeps it; last, since such a call
               may leave a device unusable
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("attention", "engine", "memory", "reads", "speed", "contract")
NEEDS = {"torch": "torch", "megatron": "megatron-core", "transformers": "transformers", "PIL": "Pillow"}
NEEDS |= {"annotated_types": "annotated-types", "psutil": "psutil"}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    from hardware.platforms import PLATFORMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=[*PLATFORMS], required=True, help="kind of machine")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a HuggingFace folder, for engine and speed")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    if unknown := [part for part in options.only.split(",") if part not in PARTS]:
        parser.error(
            f"--only {options.only}: there is no part {', '.join(unknown)}, expected some of {','.join(PARTS)}"
        )
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json in it, expected a HuggingFace folder")
    return options


def find_missing_packages() -> list[str]:
    """Find the distributions that are needed and not there."""
    return [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]


def start_device(platform: str):
    """Take the device of this process, as a training process does."""
    from hardware.platforms import get_platform

    os.environ.update(get_platform(platform).get_train_env())
    from rlworker.checks.device.report import Device

    return Device(get_platform(platform), get_platform(platform).init_process(0))


def run_parts(device, parts: list[str], folder: Path, model: Path | None = None) -> list:
    """Run parts of the check in order; their findings. An error that a part raises is a line that failed."""
    from rlworker.base.findings import format_table
    from rlworker.checks.device.attention import check_attention
    from rlworker.checks.device.contract import check_contract
    from rlworker.checks.device.engine import check_engine, check_memory, check_reads, joined_process
    from rlworker.checks.device.speed import check_speed

    checks = {
        "attention": lambda: check_attention(device),
        "engine": lambda: check_engine(device, folder, model),
        "memory": lambda: check_memory(device, folder),
        "reads": lambda: check_reads(device, folder),
        "speed": lambda: check_speed(device, folder, model),
        "contract": lambda: check_contract(device),
    }
    findings = []
    with joined_process(device):
        for part in (part for part in PARTS if part in parts):
            try:
                lines = checks[part]()
            except Exception as error:
                traceback.print_exc()
                text = " ".join(f"raised {type(error).__name__}: {error}".split())[:300]
                lines = [device.make_finding(part, "", False, text)]
            print(format_table(lines), end="\n\n", flush=True)
            findings += lines
    return findings


def main() -> None:
    """Run the command line."""
    options = parse_arguments()
    if missing := find_missing_packages():
        print(f"device_check: not installed: {', '.join(missing)}; pip install {' '.join(missing)}", file=sys.stderr)
        sys.exit(2)
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        device = start_device(options.platform)
    except RuntimeError as error:
        print(f"device_check: {error}", file=sys.stderr)
        sys.exit(2)
    from rlworker.checks.device.report import build_report

    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        findings = run_parts(device, options.only.split(","), Path(folder), options.model)
    report = build_report(device, findings)
    failed = [finding for finding in findings if finding.outcome == "FAILED"]
    print(f"{report['platform']}, {report['device']}, {report['versions']}")
    print(f"{len(findings) - len(failed)} of {len(findings)} lines passed")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
