"""Read a learner's answers from a Python file or a notebook, and load one of them.

A Python file is run as an import would run it. Of a notebook only what an exercise needs is run
(statements.py says what that is); so a demo that fails, takes minutes or ends the kernel does not
stand between an answer and its check.
"""

import ast
import dataclasses
import io
import json
import os
import sys
import tempfile
import tokenize
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..notebook.lab import unwritten
from .statements import Statement, closure, futures, remember, statements

MODULE = "answers"
SCRATCH = "SHARDBOOK_SCRATCH"  # a folder that the parent removes, set in the process of an answer


class Unusable(Exception):
    """The file holds no answers that could be examined; the message says why."""


class Missing(Exception):
    """The file defines no such name, or only imports ours."""


class NotLoaded(Exception):
    """What defines the name, or what that needs, could not be run; the message says why."""


@dataclasses.dataclass
class Answers:
    """The text of an answers file: `parts` are (title, source) of the file or of each cell.

    `stuck` holds what was seen to hang, or to end its process, while it was loaded: the statement's
    index and how. It is not run a second time.
    """

    path: str
    parts: list[tuple[str, str]]
    notebook: bool
    stuck: dict[int, str] = dataclasses.field(default_factory=dict)


def read(path: str | Path) -> Answers:
    """The answers of a .py or .ipynb file, without running anything."""
    path = Path(path)
    if path.suffix not in (".py", ".ipynb") and path.is_file():
        raise Unusable(f"{path} holds no answers: a .py or .ipynb file is expected")
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise Unusable(f"{path} is {what}: a .py or .ipynb file is expected")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror or error}") from error
    if path.suffix == ".ipynb":
        return Answers(str(path), _cells(path, raw), True)
    _parse(raw, str(path))
    return Answers(str(path), [(str(path), _decode(raw, path))], False)


def _decode(raw: bytes, path: Path) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding).replace("\r\n", "\n")
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unusable(f"{path} is no Python text: {error}") from error


def _parse(source: bytes, title: str) -> None:
    try:
        ast.parse(source, title)
    except SyntaxError as error:
        raise Unusable(f"{title}, line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unusable(f"{title} can't be parsed: {error or type(error).__name__}") from error


def _cells(path: Path, raw: bytes) -> list[tuple[str, str]]:
    try:
        cells = json.loads(raw)["cells"]
        code = [(i, c["source"]) for i, c in enumerate(cells) if c["cell_type"] == "code"]
        texts = [(f"cell {i + 1}", s if isinstance(s, str) else "".join(s)) for i, s in code]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = error if isinstance(error, json.JSONDecodeError) else "its cells can't be read"
        raise Unusable(f"{path} is no notebook: {what}") from error
    if not texts:
        raise Unusable(f"{path} holds no code cells")
    return texts


@dataclasses.dataclass
class Loaded:
    """An answer, and which of the names it uses could not be made, with the reason."""

    answer: Any
    failed: dict[str, str]


def load(answers: Answers, name: str, at: Callable[[int], None] = lambda index: None) -> Loaded:
    """Run what `name` needs. Raises what a file raises, NotLoaded or Missing.

    Before a statement of a notebook is run, `at` is told its index.
    """
    module = types.ModuleType(MODULE)
    module.__file__ = _copy(answers)
    sys.modules[MODULE] = module  # dataclasses and pickle look it up
    folder = str(Path(answers.path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    before, failed = set(sys.modules), {}
    if answers.notebook:
        failed = _run_needed(answers, name, module.__dict__, at)
    else:
        title, source = answers.parts[0]
        remember(title, source)
        exec(compile(source, title, "exec", dont_inherit=True), module.__dict__)
    _carry_by_value(module, folder, before)
    if name not in module.__dict__:
        if name in failed:
            raise NotLoaded(failed[name])
        raise Missing(f"{answers.path} defines no {name}")
    origin = str(getattr(module.__dict__[name], "__module__", ""))
    if origin.startswith("shardbook."):
        raise Missing(f"{answers.path} imports {name} from {origin}: write it there to check it")
    return Loaded(module.__dict__[name], failed)


def uses(answers: Answers, name: str) -> set[str]:
    """The names that the definition of `name` needs, in turn."""
    return closure(statements(answers.parts), name)[1] - {name}


def _copy(answers: Answers) -> str:
    """A copy for `__file__`: what an answer does to its own file is not done to the learner's."""
    folder = tempfile.mkdtemp(prefix="shardbook-answers-", dir=os.environ.get(SCRATCH))
    copy = Path(folder) / Path(answers.path).name
    copy.write_text("\n\n".join(source for _, source in answers.parts), errors="replace")
    return str(copy)


def _carry_by_value(module: types.ModuleType, folder: str, before: set[str]) -> None:
    """Ranks can't import the answers or what lies beside them: cloudpickle sends their code."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    for other in set(sys.modules) - before:
        found = sys.modules[other]
        file = getattr(found, "__file__", None) or ""
        inside = file.startswith(folder) and "site-packages" not in file
        if inside and not other.startswith("shardbook"):
            cloudpickle.register_pickle_by_value(found)


def _run_needed(
    answers: Answers, name: str, namespace: dict, at: Callable[[int], None]
) -> dict[str, str]:
    """Run the statements that `name` needs, in order; the names that failed, with the reason."""
    found = statements(answers.parts)
    chosen = closure(found, name)[0]
    for index in chosen:
        if index in answers.stuck:
            raise NotLoaded(f"it needs {found[index].where}, which {answers.stuck[index]}")
    failed: dict[str, str] = {}
    flags = futures(found)
    for index in chosen:
        at(index)
        try:
            _run(found[index], flags, namespace)
        except (Exception, SystemExit) as error:
            why = unwritten(error) or f"{type(error).__name__}: {error}"
            failed |= dict.fromkeys(found[index].binds, f"{found[index].where}: {why}")
            if name in found[index].binds and found[index].node is not None:
                namespace.pop(name, None)
    return failed


def _run(statement: Statement, flags: int, namespace: dict) -> None:
    if statement.error is not None:
        raise statement.error
    tree = ast.Module([statement.node], [])
    exec(compile(tree, statement.title, "exec", flags, dont_inherit=True), namespace)
