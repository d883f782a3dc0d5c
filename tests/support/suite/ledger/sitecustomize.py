"""Makes every Python process of a run keep the ledger: its folder stands on PYTHONPATH, where ``site`` looks for it."""

import os
import sys

from process_ledger import VARIABLE, watch


def load_hidden() -> None:
    """Load the ``sitecustomize`` that Python would have found without this one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != here])
    if spec and spec.loader:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


def find_silent_kinds() -> set[str]:
    """Find the kinds that this process does not count as, by what it was started to do."""
    # A fork server imports Megatron so that the ranks need not. It is none itself, and they note that they are.
    if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
        return {"rank"}
    # vLLM looks up what a model's class can do in a process of its own, and keeps the answer in the user's cache: a
    # test starts as many as the machine has not had yet, which says nothing about the test.
    if "vllm.model_executor.models.registry" in sys.orig_argv:
        return {"vllm", "torch"}
    return set()


if os.environ.get(VARIABLE):
    watch(find_silent_kinds())
load_hidden()
