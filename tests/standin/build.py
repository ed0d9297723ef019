"""Compile the extension once for these sources, this torch and this Python; then load it."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache"
FLAGS = ["-O1", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
NAME = "shardbook_standin"


def extension() -> ModuleType:
    """The compiled module: from the cache, or after a minute or two of compiling."""
    folder = CACHE / f"standin-{_key()}"
    if not folder.exists():
        with _lock(CACHE / "standin.lock"):
            if not folder.exists():  # another process may have built it while we waited
                _compile(folder)
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _key() -> str:
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for source in sorted((HERE / "csrc").iterdir()):
        key.update(source.name.encode() + source.read_bytes())
    return key.hexdigest()[:16]


def _compile(folder: Path) -> None:
    print("compiling the stand-in npu (once, about a minute) …", file=sys.stderr, flush=True)
    building = folder.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)  # left by a build that was killed
    building.mkdir(parents=True)
    # ninja's own folder is not on the PATH of a venv that is not activated
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    # in a process of its own, since torch loads what it has compiled from where it lies
    subprocess.run(
        [sys.executable, __file__, building], check=True, env=os.environ | {"PATH": path}
    )
    building.rename(folder)


@contextlib.contextmanager
def _lock(path: Path):
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    from torch.utils import cpp_extension

    cpp_extension.load(
        name=NAME,
        sources=[str(s) for s in sorted((HERE / "csrc").glob("*.cpp"))],
        extra_cflags=FLAGS,
        build_directory=sys.argv[1],
        is_python_module=False,
        verbose=bool(os.environ.get("VERBOSE")),
    )
