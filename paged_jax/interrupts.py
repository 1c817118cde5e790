"""Ctrl-C at a moment when nothing is half done."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class HeldInterrupts:
    """Inside of it SIGINT waits: its handler, which usually raises KeyboardInterrupt, is called at the end.

    For bookkeeping that takes microseconds and must be done whole or not at all; `release` and `hold` enclose what may
    be interrupted after all. In another thread than the main one, which signals never interrupt, it does nothing.
    """

    def __enter__(self) -> Self:
        self._is_held, self._is_pending = True, False
        is_main = threading.current_thread() is threading.main_thread()
        self._handler = signal.signal(signal.SIGINT, self._handle) if is_main else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.release()

    def hold(self) -> None:
        """From here on it waits again."""
        self._is_held = True

    def release(self) -> None:
        """From here on it is handled at once; one that waits is handled now."""
        self._is_held = False
        if self._is_pending:
            self._is_pending = False
            self._handle(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._is_pending = True
        elif callable(self._handler):
            self._handler(number, frame)
