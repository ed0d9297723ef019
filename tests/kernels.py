"""Jupyter kernels for the tests, forked from a process that holds torch already.

``Kernels().launch`` takes the place of ``jupyter_client``'s launch_kernel; kernel_server.py tells
what it saves and how a kernel comes to be. One asked for ``plain`` is started the usual way.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MESSAGE = 1 << 20  # bytes

KERNELS: "pytest.StashKey[Kernels | None]" = pytest.StashKey()
"""Where the conftest keeps this process's Kernels; None where a process can't be forked so."""


class Kernel:
    """A running kernel, with what jupyter_client uses of subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, status: socket.socket):
        self._status = status
        self.pid = int(status.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._status.recv(64) or -signal.SIGKILL)
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("kernel", timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Kernels:
    """The server of this process's kernels; it starts with the first and ends with this process."""

    PLAIN = "13_communication.ipynb"
    """The notebook whose kernel starts from nothing, as every reader's does."""

    def __init__(self):
        self._control: socket.socket | None = None
        self.plain = False  # whether the next kernels start from nothing
        self._before = 0.0

    def launch(self, cmd: list[str], env: dict[str, str] | None = None, cwd=None, **_) -> Kernel:
        if self._control is None:
            self._start()
        ours, theirs = socket.socketpair()
        request = {
            "cmd": list(cmd),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "plain": self.plain,
        }
        try:
            self._ask(request, [theirs.fileno()])
        except OSError:  # a test ended all children of this process, the server too
            self._control.close()
            self._start()
            self._ask(request, [theirs.fileno()])
        theirs.close()
        return Kernel(ours)

    def used(self) -> float:
        """CPU seconds of all kernels so far, with everything they started; once it has ended."""
        if self._control is None:
            return 0.0
        try:
            self._ask({"used": True})
        except OSError:  # it has ended, with the kernels it had
            return self._before
        return float(self._control.recv(64) or self._before)

    def used_since_last(self) -> float:
        before, self._before = self._before, self.used()
        return self._before - before

    def take_over(self) -> None:
        """From now on every kernel that jupyter_client starts in this process is one of ours."""
        from jupyter_client.provisioning import local_provisioner

        local_provisioner.launch_kernel = self.launch

    def _start(self) -> None:
        self._before = 0.0
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._control.setsockopt(socket.SOL_SOCKET, size, MESSAGE)
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernel_server", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def _ask(self, request: dict, fds: list[int] = ()) -> None:
        socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))
