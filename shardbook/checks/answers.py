"""Read a learner's answers from a Python file or a notebook.

A Python file is run as an import would run it. Of a notebook only what an exercise needs is run:
the statements that define its name and, in turn, the names those use; so a demo that fails, takes
minutes or ends the kernel does not stand between an answer and its check.
"""

import ast
import builtins
import dataclasses
import json
import linecache
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULE = "answers"
SCRATCH = "SHARDBOOK_SCRATCH"  # a folder that the parent removes, set in the process of an answer


class Unusable(Exception):
    """The file holds no answers that could be examined; the message says why."""


class Missing(Exception):
    """The file defines no such name, or its definition raised."""


@dataclasses.dataclass
class Answers:
    """The text of an answers file: `parts` are (title, source) of the file or of each cell."""

    path: str
    parts: list[tuple[str, str]]
    notebook: bool


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
    parse(raw, str(path))
    return Answers(str(path), [(str(path), _decode(raw, path))], False)


def _decode(raw: bytes, path: Path) -> str:
    import io
    import tokenize

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding).replace("\r\n", "\n")
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unusable(f"{path} is no Python text: {error}") from error


def parse(source: str | bytes, title: str) -> ast.Module:
    """The syntax tree, or Unusable with the line."""
    try:
        return ast.parse(source, title)
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


def load(answers: Answers, name: str) -> Any:
    """Run what `name` needs and return its object. Raises what the code raises, or Missing."""
    module = types.ModuleType(MODULE)
    module.__file__ = _copy(answers)
    sys.modules[MODULE] = module  # dataclasses and pickle look it up
    folder = str(Path(answers.path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    before = set(sys.modules)
    if answers.notebook:
        _run_needed(answers, name, module.__dict__)
    else:
        title, source = answers.parts[0]
        _remember(title, source)
        exec(compile(source, title, "exec", dont_inherit=True), module.__dict__)
    _carry_by_value(module, folder, before)
    if name not in module.__dict__:
        raise Missing(f"{answers.path} defines no {name}")
    origin = str(getattr(module.__dict__[name], "__module__", ""))
    if origin.startswith("shardbook."):
        raise Missing(f"{answers.path} imports {name} from {origin}: write it there to check it")
    return module.__dict__[name]


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


def _remember(title: str, source: str) -> None:
    """inspect.getsource and tracebacks find the text even if the file is gone or is a cell."""
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)


# Notebooks


def _run_needed(answers: Answers, name: str, namespace: dict) -> None:
    statements = [s for title, text in answers.parts for s in _statements(title, text)]
    trouble = ""
    for title, node in needed(statements, name):
        try:
            exec(compile(ast.Module([node], []), title, "exec", dont_inherit=True), namespace)
        except NotImplementedError:
            raise
        except Exception as error:
            trouble = f"{title}, line {node.lineno}: {type(error).__name__}: {error}"
            if name in _binds(node):
                namespace.pop(name, None)
    if trouble and name not in namespace:
        raise Missing(f"{name} could not be defined ({trouble})")


def _statements(title: str, text: str) -> list[tuple[str, ast.stmt]]:
    """A cell's statements; magics are left out, and so is a cell that can't be parsed."""
    first = text.lstrip().split("\n", 1)
    if first[0].startswith(("%%time", "%%capture")):  # these run the cell as it is
        text = first[1] if len(first) > 1 else ""
    elif first[0].startswith("%%"):
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        from IPython.core.inputtransformer2 import TransformerManager

        try:  # magics and shell commands become calls, and calls alone define nothing
            text = TransformerManager().transform_cell(text)
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return []
    _remember(title, text)
    return [(title, node) for node in tree.body]


def needed(statements: list[tuple[str, ast.stmt]], name: str) -> list[tuple[str, ast.stmt]]:
    """The statements, in order, that define `name` and what those use; star imports always."""
    chosen: set[int] = set()
    wanted, seen = [name], {name}
    while wanted:
        target = wanted.pop()
        for i, (_, node) in enumerate(statements):
            if i in chosen or not ({target, "*"} & _binds(node)):
                continue
            chosen.add(i)
            used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            new = used - seen - set(dir(builtins))
            seen |= new
            wanted += new
    return [statements[i] for i in sorted(chosen)]


def _binds(node: ast.stmt) -> set[str]:
    """Names a top-level statement defines or changes: x = …, x.y = …, x[0] = …, def x, import x."""
    if isinstance(node, ast.Expr):
        return {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
    return set(_bound(node))


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return  # what its body binds is its own
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield (alias.asname or alias.name).split(".")[0]
        return
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        if isinstance(node.ctx, ast.Store):
            while not isinstance(node, ast.Name):
                if not isinstance(node, (ast.Attribute, ast.Subscript)):
                    return
                node = node.value
            yield node.id
        return
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)
