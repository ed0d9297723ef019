"""For every test and notebook: outputs that do not depend on the devices, operators noted.

With ``pytest -n 2`` the cells of a notebook stay together, in order, in one kernel.
"""

import os
from pathlib import Path

import pytest

# sb.run warns in the cell where there are fewer devices than ranks; nbval would compare that.
_IGNORED = "ignore:More ranks than devices"
os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _IGNORED]))
os.environ.setdefault("SHARDBOOK_LIVE", "0")  # output in one piece, however long a run takes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A notebook's kernel on the stand-in npu notes its operators in a file of its name."""
    folder = os.environ.get("SHARDBOOK_STANDIN_OPS_DIR")
    if folder and item.path.suffix == ".ipynb":
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"{item.path.parent.name}-{item.path.stem}.ops"
        os.environ["SHARDBOOK_STANDIN_OPS"] = str(Path(folder).absolute() / name)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """xdist deals out test by test unless told otherwise; a notebook's cells belong together."""
    notebooks = config.getoption("nbval", False) or config.getoption("nbval_lax", False)
    if notebooks and config.getoption("dist", "no") == "load":
        config.option.dist = "loadfile"
