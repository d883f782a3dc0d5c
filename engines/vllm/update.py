"""The limit on a weight update: an engine that waits for its next bucket samples nothing, and must end at last."""

import os
import sys
import threading

_LIMIT_S = 900.0
"""Seconds to wait for the next bucket; a lost trainer is restarted in less."""


class UpdateLimit:
    """Ends this process if an update stays unfinished, so that another engine replaces it."""

    def __init__(self, limit_s: float = _LIMIT_S):
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def note_bucket(self, version: int, is_last: bool) -> None:
        """Record that a bucket of ``version`` has come; after the last bucket there is no limit."""
        if self._timer:
            self._timer.cancel()
        self._timer = None if is_last else threading.Timer(self._limit_s, self._end_process, [version])
        if self._timer:
            self._timer.daemon = True
            self._timer.start()

    def _end_process(self, version: int) -> None:
        print(f"weight sync: version {version} came in part, no bucket for {self._limit_s:g} s", file=sys.stderr)
        os._exit(1)
