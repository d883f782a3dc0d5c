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


if os.environ.get(VARIABLE):
    # A fork server imports Megatron so that the ranks need not. It is none itself, and they note that they are.
    is_fork_server = any("multiprocessing.forkserver" in argument for argument in sys.orig_argv)
    watch(silent={"rank"} if is_fork_server else set())
load_hidden()
