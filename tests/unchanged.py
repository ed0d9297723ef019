"""Leave out tests that passed and of which nothing has changed: ``pytest -p tests.unchanged``.

A test's key is a hash of its file, of every file of this repository that it imports in turn
(read with ast; what is found by a name at run time or read as data is declared below), of the
conftests and pyproject.toml, of the installed packages and of the SHARDBOOK_ variables. The keys of
what passed are kept in .cache/passed.json. A test that failed or was skipped runs again, and so
does every test that reads files or starts processes in a way nobody declared. Never used in CI.
"""

import ast
import hashlib
import json
import os
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASSED = ROOT / ".cache" / "passed.json"
KINDS = {".py", ".ipynb", ".js", ".md", ".toml", ".json", ".cpp", ".h", ".txt", ".yml", ".sh"}
LIBRARY = ["shardbook/**"]
DECLARED = {  # beside what a file imports: patterns of what its tests read or start
    "tests/test_checks.py": [],  # by chapter, see _patterns
    "tests/test_check_cli.py": [*LIBRARY, "labs/*", "solutions/*", "tests/wrong_answers/*"],
    "tests/test_calls.py": LIBRARY,
    "tests/test_device.py": [*LIBRARY, "tests/standin/**"],
    "tests/test_faults.py": LIBRARY,
    "tests/test_dit_parallel.py": LIBRARY,
    "tests/test_pipeline_parallel.py": LIBRARY,
    "tests/test_ranks.py": LIBRARY,
    "tests/test_trace_ranks.py": LIBRARY,
    "tests/test_view.py": LIBRARY,
    "tests/port/test_cli.py": [*LIBRARY, "tests/port/*", "book/44_dit_port/**"],
    "tests/port/test_project.py": [*LIBRARY, "tests/port/*", "book/44_dit_port/**"],
    "tests/port/test_rules.py": [*LIBRARY, "tests/port/*", "book/44_dit_port/**"],
    "notebooks/02_running_on_ascend.ipynb": LIBRARY,
    "notebooks/44_dit_port.ipynb": ["book/44_dit_port/**"],
    "solutions/44_dit_port.ipynb": ["book/44_dit_port/**"],
}
LAB = "tests/test_book.py::test_an_unsolved_lab_runs_from_top_to_bottom"  # the slow one there
ALWAYS = ["conftest.py", "tests/conftest.py", "tests/kernel_server.py", "pyproject.toml"]
REACHES_OUT = {"subprocess", "ROOT", "__file__", "open"}  # names in a test file


def _snapshot() -> dict[str, tuple[str, bytes]]:
    """``{path: (hash, text)}`` of the sources as they are when the run starts."""
    found = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not f.startswith((".", "__")) and f != "build"]
        for file in files:
            path = Path(folder, file)
            if path.suffix in KINDS:
                text = path.read_bytes()
                name = path.relative_to(ROOT).as_posix()
                found[name] = (hashlib.sha256(text).hexdigest(), text)
    return found


FILES = _snapshot()


def _module(dotted: str) -> str | None:
    path = dotted.replace(".", "/")
    return next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in FILES), None)


def _source(path: str) -> str:
    text = FILES[path][1].decode(errors="replace")
    if not path.endswith(".ipynb"):
        return text
    cells = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    lines = "\n".join(cells).splitlines()
    return "\n".join("pass" if re.match(r"\s*[%!]", x) else x for x in lines)


@cache
def _imports(path: str) -> frozenset[str]:
    """Files of this repository that a file imports, or names as a module in a string."""
    try:
        tree = ast.parse(_source(path))
    except SyntaxError:  # a cell in another language: everything could be in it
        return frozenset(p for p in FILES if p.startswith("shardbook/"))
    package = path.split("/")[:-1]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module} | {f"{module}.{a.name}" for a in node.names}
        elif re.fullmatch(r"[a-z_]\w*(\.\w+)*", str(getattr(node, "value", ""))):
            names |= {str(node.value), f"shardbook.{node.value}"}
    # importing a.b.c runs a and a.b too
    names = {".".join(n.split(".")[: i + 1]) for n in names for i in range(n.count(".") + 1)}
    return frozenset(filter(None, map(_module, names)))


@cache
def _closure(start: frozenset[str]) -> frozenset[str]:
    seen, queue = set(), list(start)
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.endswith((".py", ".ipynb")):
            queue += _imports(path)
        if path.endswith("/__init__.py"):  # data that lies in the package
            folder = path.rpartition("/")[0]
            queue += [p for p in FILES if p.rpartition("/")[0] == folder and p[-3:] != ".py"]
    return frozenset(seen)


def _matching(pattern: str) -> set[str]:
    if pattern.endswith("/**"):
        return {p for p in FILES if p.startswith(pattern[:-2])}
    folder, _, name = pattern.rpartition("/")
    wanted = re.compile(re.escape(name).replace(r"\*", "[^/]*"))
    return {
        p for p in FILES if p.rpartition("/")[0] == folder and wanted.fullmatch(p.split("/")[-1])
    }


@cache
def _patterns(nodeid: str) -> tuple[str, ...] | None:
    """What a test reads beside its imports; None if nobody has said."""
    path = nodeid.split("::")[0]
    if nodeid.startswith(LAB):
        return (*LIBRARY, f"labs/{nodeid.partition('[')[2][:-1]}.ipynb")
    if chapter := re.match(r"tests/test_checks\.py::test_\w+\[(\d\d)", nodeid):
        from shardbook.chapters import CHAPTERS

        name = CHAPTERS[int(chapter[1])]
        answers = f"tests/wrong_answers/c{chapter[1]}_*.py"
        return (answers, f"shardbook/checks/{name}.py", f"shardbook/checks/{name}/**")
    if path in DECLARED:
        return tuple(DECLARED[path])
    if path.endswith(".ipynb"):
        return ()
    tree = ast.parse(FILES[path][1])
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return None if used & REACHES_OUT else ()


@cache
def _surroundings() -> str:
    packages = sorted(f"{d.name}=={d.version}" for d in metadata.distributions())
    variables = sorted(
        f"{k}={v}" for k, v in os.environ.items()
        if k.startswith("SHARDBOOK_") and k not in ("SHARDBOOK_CPU_LOG", "SHARDBOOK_STANDIN_OPS")
    )  # fmt: skip
    return repr((sys.version, sys.prefix, packages, variables))


@cache
def key(nodeid: str) -> str | None:
    """The hash of all a test depends on, or None if that is not known."""
    patterns, path = _patterns(nodeid), nodeid.split("::")[0]
    if patterns is None or path not in FILES:
        return None
    extra = {p for pattern in patterns for p in _matching(pattern)}
    files = sorted(_closure(frozenset({path, *ALWAYS, *extra} & set(FILES))))
    text = _surroundings() + repr([(p, FILES[p][0]) for p in files])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def unit(nodeid: str) -> str:
    """What is left out as a whole: a test, or a notebook with all its cells."""
    path = nodeid.split("::")[0]
    return path if path.endswith(".ipynb") else nodeid


class Unchanged:
    """The plugin: which tests are left out, and which passed in this run."""

    def __init__(self):
        try:
            self.known = json.loads(PASSED.read_text())
        except (OSError, ValueError):
            self.known = {}
        self.left_out = 0
        self.reports: dict[str, list[bool]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items) -> None:
        out = [i for i in items if (k := key(i.nodeid)) and self.known.get(unit(i.nodeid)) == k]
        if out:
            config.hook.pytest_deselected(items=out)
            gone = set(map(id, out))
            items[:] = [i for i in items if id(i) not in gone]
        self.left_out = len(out)

    def pytest_runtest_logreport(self, report) -> None:
        good = report.passed and not hasattr(report, "wasxfail")
        self.reports.setdefault(unit(report.nodeid), []).append(good)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get("unchanged", 0))

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["unchanged"] = self.left_out
            return
        passed = {u: key(u) for u, oks in self.reports.items() if all(oks) and _whole(u, len(oks))}
        gone = {u for u, oks in self.reports.items() if not all(oks)}
        try:
            now = json.loads(PASSED.read_text())
        except (OSError, ValueError):
            now = {}
        now = {u: k for u, k in now.items() if u not in gone} | {
            u: k for u, k in passed.items() if k
        }
        PASSED.parent.mkdir(exist_ok=True)
        half = PASSED.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(now, indent=0))
        half.replace(PASSED)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.left_out:
            terminalreporter.write_line(
                f"skipped {self.left_out} tests: nothing they import changed; "
                "ARGS=--all runs everything"
            )


def _whole(name: str, reports: int) -> bool:
    """Of a notebook every cell has reported: before, while and after it ran."""
    if not name.endswith(".ipynb"):
        return True
    cells = json.loads(FILES[name][1])["cells"]
    return reports == 3 * sum(c["cell_type"] == "code" for c in cells)


def pytest_configure(config) -> None:
    if not os.environ.get("CI"):
        config.pluginmanager.register(Unchanged(), "unchanged-tests")
