"""One thread a process, and no learner's progress touched, in every test and what it starts."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["SHARDBOOK_PROGRESS"] = ""
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this environment
os.environ.pop("JPY_SESSION_NAME", None)


@pytest.fixture(scope="module")
def on_cpu():
    """Ranks run on the cpu and talk through gloo, whatever devices there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDBOOK_DEVICE", "cpu")
        yield
