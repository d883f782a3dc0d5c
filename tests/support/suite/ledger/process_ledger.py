"""The ledger of a run of the suite: a line for every process that became one of the expensive kinds.

Every Python process of a run loads this at its start, so it needs nothing that an interpreter has not loaded by then.
"""

import os
import sys

VARIABLE = "SUITE_LEDGER"
"""Environment variable that names the ledgers of the run, and of those around it where a test runs pytest itself."""
KINDS = {"vllm": "vllm", "megatron.core": "rank", "torch": "torch"}
"""Package -> what a process becomes that imports it."""


def note(kind: str) -> None:
    """Write into the ledgers that this process is of ``kind``. Twice is as good as once, and without a ledger nothing
    happens.

    The line has the process's start too, since a long run may see a pid again.
    """
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        try:
            with open("/proc/self/stat") as stat:
                started = stat.read().rpartition(")")[2].split()[19]
            ledger = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError:  # the run is over, and this process outlived it
            continue
        os.write(ledger, f"{kind} {os.getpid()} {started}\n".encode())  # in one piece, so that lines do not mix
        os.close(ledger)


class Watch:
    """A finder of modules that finds none: it notes the first import of an expensive package.

    That is when a submodule is looked for. The package itself is also looked for by those who only ask whether there is
    one. A forked process inherits what was imported, and so has it not noted again.
    """

    def __init__(self, silent: set[str]):
        """``silent`` are kinds that this process is not counted as, though those that it forks are."""
        self._silent, self._pid = silent, os.getpid()
        self._seen = {kind for package, kind in KINDS.items() if package in sys.modules}

    def find_spec(self, name, path=None, target=None) -> None:
        kind = KINDS.get(name.rpartition(".")[0])
        if kind and kind not in self._seen:
            self._seen.add(kind)
            if kind not in self._silent or os.getpid() != self._pid:
                note(kind)


def watch(silent: set[str]) -> None:
    """Note what this process imports from now on."""
    sys.meta_path.insert(0, Watch(silent))
