"""The lock of a run folder, which belongs to one process at a time."""

import errno
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as a network's: a run on them goes on without one."""


def lock(path: Path, where: str) -> FileLock:
    """Take the lock that is the file at ``path``; its ``release`` or the end of this process gives it back.

    Raises:
        ValueError: another process has it; the message names ``where``, host and process.
        OSError: the file cannot be written to.
    """
    taken = FileLock(path, blocking=False, thread_local=False)
    try:
        taken.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        raise ValueError(
            f"{where} is being written to by {holder}; wait for its end, or end it, or choose another --run-dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    path.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n", encoding="utf-8")
    return taken
