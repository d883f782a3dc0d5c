"""The ledger of a run of the tests: a line for each process that became one of the expensive kinds.

``budget.py`` puts this folder on PYTHONPATH, so that each Python process of a run loads this file as it starts.
"""

import os
import sys

LEDGER = "SUITE_LEDGER"
"""Environment variable that names the ledger."""
KINDS = {"vllm": "vllm", "megatron.core": "rank", "torch": "torch"}
"""Package -> the kind of a process that imports it."""


def note(kind: str) -> None:
    """Write that this process is of a kind. A rank that is forked imports nothing, and calls this by itself.

    Twice is as good as once.
    """
    try:
        ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND)
    except (KeyError, OSError):  # no run of the tests, or one that is over
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "master")
    os.write(ledger, f"{kind} {worker} {os.getpid()}\n".encode())  # in one piece
    os.close(ledger)


class Watch:
    """A finder of modules that finds none: it notes the first submodule of an expensive package.

    The package itself is also looked for where code asks whether it is installed. A fork inherits ``kinds``, so that
    an import of its parent is not noted again.
    """

    def __init__(self, kinds: set[str]):
        self.kinds = kinds

    def find_spec(self, name, path=None, target=None) -> None:
        kind = KINDS.get(name.rpartition(".")[0])
        if kind in self.kinds:
            self.kinds.remove(kind)
            note(kind)


if os.environ.get(LEDGER):
    _kinds = set(KINDS.values())
    if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
        _kinds.remove("rank")  # it imports Megatron so that ranks need not, and is none
    if "vllm.model_executor.models.registry" in sys.orig_argv:
        _kinds.clear()  # vLLM looks a model up, and keeps the answer in the user's cache: the next run starts none
    sys.meta_path.insert(0, Watch(_kinds))
