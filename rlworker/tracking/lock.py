"""The lock of a run folder, which belongs to one process at a time."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors that file systems without locks answer with."""


def lock(path: Path, where: str) -> IO:
    """Take the lock that is the file at ``path``; it is given back when the file is closed or this process ends.

    Raises:
        ValueError: another process has it; the message names ``where``, host and process.
        OSError: the file cannot be written to.
    """
    file = open(path, "a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{where} is being written to by {holder}; wait for its end, or end it, or choose another --run-dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a network's file system may have none, and is no worse than before
            raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
    file.flush()
    return file
