"""Two torchrun agents on this machine, each as a host of its own would start one."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def run_on_two_hosts(text: str, ranks_per_host: int = 2, timeout: float = 120) -> list[str]:
    """Start a file of this text under two torchrun agents that meet on loopback.

    Returns what each host's agent and its ranks printed. Raises RuntimeError with what they said if
    one ends with another exit code than 0, or both are not done within `timeout` seconds.
    """
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="shardbook-hosts-") as folder:
        path = Path(folder) / "job.py"
        path.write_text(text)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", str(ranks_per_host), "--rdzv-backend", "c10d"),
            *("--rdzv-id", f"two-hosts-{port}", "--rdzv-endpoint", f"localhost:{port}"),
            *("--local-addr", "localhost", str(path)),
        ]
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
        hosts = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
            )
            for _ in range(2)
        ]
        try:
            said = [host.communicate(timeout=timeout) for host in hosts]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the two agents were not done within {timeout:g} s") from None
        finally:
            for host in hosts:
                host.kill()
    if any(host.returncode for host in hosts):
        raise RuntimeError("an agent failed:\n" + "\n".join(text for pair in said for text in pair))
    return [out for out, _ in said]
