"""The limit on an update: an engine that waits for its next bucket of weights samples nothing, and must not wait for
ever."""

import os
import sys
import threading

_LIMIT_S = 900.0
"""Seconds to wait for the next bucket; a lost trainer is restarted in less."""


class UpdateLimit:
    """Ends this process when an update stays half done, so that another engine takes its place."""

    def __init__(self, limit_s: float = _LIMIT_S):
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def note_bucket(self, version: int, is_last: bool) -> None:
        """Take note of a bucket of ``version``; after the last one there is no limit."""
        if self._timer:
            self._timer.cancel()
        self._timer = None if is_last else threading.Timer(self._limit_s, self._end_process, [version])
        if self._timer:
            self._timer.daemon = True
            self._timer.start()

    def _end_process(self, version: int) -> None:
        print(f"weight sync: version {version} came in part, no bucket for {self._limit_s:g} s", file=sys.stderr)
        os._exit(1)
