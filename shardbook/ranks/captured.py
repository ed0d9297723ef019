"""What a process that is already a rank prints: kept in a file while its function runs."""

import contextlib
import os
import sys
import tempfile
import threading

from . import output


class Captured:
    """Between `begin` and `end`, descriptors 1 and 2 lead into a file; `text` is what came.

    By descriptor, so that what C++ and subprocesses print belongs to this rank too. With `live` its
    lines are shown as they come once the block has lasted a while, as `sb.run` does in a notebook.
    """

    def __init__(self, live: bool):
        self.live, self.text, self.tail = live, "", None
        self._saved: list[int] = []
        self._done = threading.Event()

    def begin(self) -> None:
        """Lead both descriptors into a file of this rank's own."""
        handle, self._path = tempfile.mkstemp(prefix="shardbook-output-")
        _flush()
        self._saved = [os.dup(1), os.dup(2)]
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
        if self.live:
            self.tail = output.Tail(self._path, self._show)
            threading.Thread(target=self._follow, daemon=True).start()

    def end(self) -> str:
        """Lead them back; what was printed."""
        if self._saved:
            self._done.set()
            _flush()
            for fd, saved in zip((1, 2), self._saved, strict=True):
                os.dup2(saved, fd)
                os.close(saved)
            self._saved = []
            self.text = output.read(self._path)
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        return self.text

    def give_up(self) -> None:
        """For a rank that fails or hangs: lead back, and print what it had printed, as it was."""
        if self._saved and (text := self.end()):
            output.show(text.rstrip("\n"))

    def _follow(self) -> None:
        while not self._done.wait(0.2):
            self.tail.poll()

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._saved[0], f"{text}\n".encode("utf-8", "replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by something else
            stream.flush()
