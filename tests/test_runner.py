"""What runs the tests: forked kernels, tests that are left out, CPU time that is counted."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import unchanged
from tests.kernels import Kernels

ROOT = Path(__file__).resolve().parent.parent

# What a cell can see of how its kernel came to be.
LOOK = """
import os, random, signal, sys, threading, warnings, logging
seen = {
    "argv": sys.argv[:1], "path": sys.path, "cwd": os.getcwd(),
    "leader": os.getpgid(0) == os.getpid(),
    "main": sorted(n for n in vars(sys.modules["__main__"]) if n[0] != "_"),
    "ours": sorted(m for m in sys.modules if m.split(".")[0] == "shardbook"),
    "threads": sorted(t.name.split("-")[0] for t in threading.enumerate()),
    "signals": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals
                if s not in (signal.SIGKILL, signal.SIGSTOP)},
    "handlers": [type(h).__name__ for h in logging.getLogger().handlers],
    "environ": {k: v for k, v in os.environ.items() if k != "JPY_PARENT_PID"},
}
import matplotlib, matplotlib.pyplot as plt, numpy as np, torch, torch._dynamo
import shardbook as sb
seen["filters"] = sorted(set(map(str, warnings.filters)))  # each import adds its own
seen["torch"] = [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()]
seen["backend"] = plt.get_backend()
seen["ranks"] = sb.run(lambda: (os.getcwd(), sys.path), world_size=2).values
seen["seeds"] = [torch.initial_seed(), sb.run(torch.initial_seed, world_size=1).values[0]]
seen["seeds"] += [random.getstate()[1][0], int(np.random.get_state()[1][5])]
seen["magic"] = "ranks" in get_ipython().magics_manager.magics["cell"]
import json
print(json.dumps(seen, default=str))
"""


def looked(kernels: Kernels, folder: Path) -> dict:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LOOK)])
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, kernel_name="python3", resources=resources).execute()
    return json.loads("".join(o.text for o in book.cells[0].outputs if o.get("name") == "stdout"))


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")
def test_a_forked_kernel_is_like_a_fresh_one(tmp_path, monkeypatch):
    from jupyter_client.provisioning import local_provisioner

    kernels = Kernels()
    monkeypatch.setattr(local_provisioner, "launch_kernel", kernels.launch)
    forked = looked(kernels, tmp_path)
    cheap = kernels.used()
    other = looked(kernels, tmp_path)
    used = kernels.used()
    kernels.plain = True
    fresh = looked(kernels, tmp_path)
    dear = kernels.used() - used
    seeds = [k.pop("seeds") for k in (forked, other, fresh)]
    assert len({s for each in seeds for s in each}) == 12, "each process has seeds of its own"
    assert forked["ranks"] and forked["ours"] == []
    for what in fresh:
        assert forked[what] == fresh[what], what
    assert cheap < dear / 2, f"{cheap:.1f} CPU seconds forked, {dear:.1f} from nothing"
    assert kernels.used_since_last() > 0


@pytest.fixture
def repository(monkeypatch):
    """Files as `unchanged` sees them, to be edited by the test."""
    files = {
        "tests/test_a.py": "import shardbook.one\ndef test(): ...",
        "tests/test_b.py": "import subprocess\nsubprocess.run('true')",
        "tests/test_view.py": "from shardbook import view\nopen('x')",
        "shardbook/__init__.py": "HOMES = {'two': 'deep.two'}",
        "shardbook/one.py": "def f():\n    from . import three",
        "shardbook/three.py": "",
        "shardbook/deep/__init__.py": "",
        "shardbook/deep/two.py": "",
        "shardbook/deep/drawn.js": "",
        "shardbook/other.py": "",
        "notebooks/01_x.ipynb": json.dumps(
            {"cells": [{"cell_type": "code", "source": "%%time\nimport shardbook.other"}]}
        ),
        "pyproject.toml": "",
    }

    def put() -> None:
        monkeypatch.setattr(unchanged, "FILES", {p: (t, t.encode()) for p, t in files.items()})
        for cached in (unchanged._imports, unchanged._closure, unchanged._patterns, unchanged.key):
            cached.cache_clear()

    put()
    yield lambda path, text: (files.update({path: text}), put())
    for cached in (unchanged._imports, unchanged._closure, unchanged._patterns, unchanged.key):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("edited", "reaches"),
    [
        ("tests/test_a.py", {"a"}),
        ("shardbook/one.py", {"a", "view"}),
        ("shardbook/three.py", {"a", "view"}),  # in turn, and inside a function
        ("shardbook/deep/two.py", {"a", "view", "notebook"}),  # by a name in a string
        ("shardbook/deep/drawn.js", {"a", "view", "notebook"}),  # data of a package
        ("shardbook/other.py", {"view", "notebook"}),  # declared: all of the library
        ("pyproject.toml", {"a", "view", "notebook"}),
    ],
)
def test_a_test_runs_again_if_what_it_reaches_changed(repository, edited, reaches):
    names = {
        "a": "tests/test_a.py::test",
        "view": "tests/test_view.py::test",
        "notebook": "notebooks/01_x.ipynb::Cell 0",
    }
    before = {n: unchanged.key(i) for n, i in names.items()}
    assert all(before.values())
    repository(edited, "edited = 1" if edited.endswith(".py") else "edited")
    assert {n for n, i in names.items() if unchanged.key(i) != before[n]} == reaches


def test_a_test_that_starts_what_nobody_declared_is_never_left_out(repository):
    assert unchanged.key("tests/test_b.py::test") is None


def test_what_failed_or_was_skipped_is_not_remembered(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import os, pytest
        def test_good(): ...
        def test_bad(): assert os.environ.get("GOOD")
        def test_skipped(): pytest.skip("no device")
        """)
    )
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "unchanged.py"):
        (tmp_path / "tests" / name).write_text((ROOT / "tests" / name).read_text())

    def run(**env) -> str:
        kept = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith("PYTEST")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.unchanged", "test_it.py"]
        env = kept | {"PYTHONPATH": str(tmp_path)} | env
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.stdout

    assert "1 failed, 1 passed, 1 skipped" in run()
    again = run()
    assert "1 failed, 1 skipped, 1 deselected" in again
    assert "skipped 1 tests: nothing they import changed; ARGS=--all runs everything" in again
    assert "1 failed, 1 passed, 1 skipped" in run(CI="true")
    (tmp_path / "test_it.py").write_text((tmp_path / "test_it.py").read_text() + "\n# changed\n")
    assert "2 passed, 1 skipped" in run(GOOD="1")


def test_cpu_time_counts_processes_of_no_parent():
    spec = importlib.util.spec_from_file_location("cpu", ROOT / "tools" / "cpu.py")
    cpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cpu)
    meter = cpu.Meter()
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
    meter.start([sys.executable, "-c", orphan], start_new_session=True).wait()
    for _ in range(600):
        if meter.seconds() > 0.5:
            break
        time.sleep(0.1)
    assert meter.seconds() > 0.5
    assert meter.close() == 0 or meter.remark


def test_the_kernels_server_starts_again_where_a_test_has_ended_it():
    import psutil

    mine = Kernels()
    command = [sys.executable, "-m", "ipykernel_launcher", "--version"]
    assert mine.launch(command).wait(60) == 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another test's, which has just ended
            if "tests.kernel_server" in child.cmdline():
                child.kill()
                child.wait(10)
    assert mine.launch(command).wait(60) == 0
    assert mine.used() >= 0
