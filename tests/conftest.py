"""One thread a process, and no learner's progress touched, in every test and what it starts."""

import os

import pytest

from tests.kernels import KERNELS

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["SHARDBOOK_PROGRESS"] = ""
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this environment
os.environ.pop("JPY_SESSION_NAME", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the cpu whatever devices there are is marked, so that it is not tested twice."""
    for item in items:
        if "on_cpu" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cpu)


@pytest.fixture(scope="session")
def warm_kernels(request):
    """Kernels come from tests/kernels.py, which holds torch already."""
    if request.config.stash[KERNELS]:
        request.config.stash[KERNELS].take_over()


@pytest.fixture(scope="module")
def on_cpu():
    """Ranks run on the cpu and talk through gloo, whatever devices there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDBOOK_DEVICE", "cpu")
        yield
