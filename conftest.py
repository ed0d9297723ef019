"""For every test and notebook: outputs that do not depend on the devices, operators noted.

With ``pytest -n 2`` the cells of a notebook stay together, in order, in one kernel. Kernels come
from tests/kernels.py, and a notebook that uses more CPU seconds than it may take fails.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.kernels import KERNELS, Kernels

# sb.run warns in the cell where there are fewer devices than ranks; nbval would compare that.
_IGNORED = "ignore:More ranks than devices"
os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _IGNORED]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as book/build.py executes notebooks
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("SHARDBOOK_LIVE", "0")  # output in one piece, however long a run takes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A notebook's kernel on the stand-in npu notes its operators in a file of its name."""
    if item.path.suffix != ".ipynb":
        return
    if kernels := item.config.stash[KERNELS]:
        kernels.plain = item.path.name == Kernels.PLAIN
    if folder := os.environ.get("SHARDBOOK_STANDIN_OPS_DIR"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"{item.path.parent.name}-{item.path.stem}.ops"
        os.environ["SHARDBOOK_STANDIN_OPS"] = str(Path(folder).absolute() / name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """After a notebook's last cell: what its kernel and the ranks of that used is within limits."""
    result = yield
    last = nextitem is None or nextitem.path != item.path
    kernels = item.config.stash[KERNELS]
    if kernels and last and item.path.suffix == ".ipynb":
        used = kernels.used_since_last()
        if log := os.environ.get("SHARDBOOK_CPU_LOG"):
            with open(log, "a") as file:
                file.write(f"{used:.1f}\t{item.path.parent.name}/{item.path.name}\n")
        from book.build import CPU, LIMIT, LIMITS

        most = CPU * LIMITS.get(int(item.path.name[:2]), LIMIT)[1]
        if used > most and "SHARDBOOK_DEVICE_PLUGIN" not in os.environ:
            pytest.fail(f"{item.path.name} used {used:.0f} CPU seconds, the limit is {most:.0f}")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """xdist deals out test by test unless told otherwise; a notebook's cells belong together."""
    notebooks = config.getoption("nbval", False) or config.getoption("nbval_lax", False)
    if notebooks and config.getoption("dist", "no") == "load":
        config.option.dist = "loadfile"
    config.stash[KERNELS] = Kernels() if sys.platform == "linux" else None
    if notebooks and config.stash[KERNELS]:
        config.stash[KERNELS].take_over()
