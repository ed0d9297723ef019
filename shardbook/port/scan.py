"""From files to findings: read each as text, parse it, hand it to the reader."""

import ast
import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from .reader import Reader
from .rules import RULES

# A file that mentions none of these can hold nothing the rules know: most files of a project.
WORTH_READING = re.compile(
    r"cud|nccl|nvidia|nvtx|flash_attn|apex|xformers|triton|float64|double|complex|polar|linspace"
    r"|torch\.ops|compile|load_library|Conv3d|conv3d|\.to\(|fork|float8|bitsandbytes|pynvml|from_numpy"
    r"|fft|sdp|ReduceOp|cpp_extension|transformer_engine|cupy|device|tensorrt|flashinfer|GPUtil|nvcc|_ssm|natten",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One place in one file. Line and column as editors count them: from 1."""

    file: str
    line: int
    column: int
    rule: str
    code: str

    @property
    def severity(self) -> str:
        """breaks, wrong, slow or style."""
        return RULES[self.rule].severity


def scan_source(source: str, file: str = "<string>") -> list[Finding]:
    """The findings of one file's text, in order; a file that is no Python 3 is one finding."""
    if not WORTH_READING.search(source):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return [Finding(file, line, 1, "unreadable", str(error).splitlines()[0])]
    lines = source.splitlines()
    found: dict[tuple[int, str], Finding] = {}

    def report(node: ast.AST, rule: str) -> None:
        line = getattr(node, "lineno", 1)
        text = lines[line - 1].strip() if line <= len(lines) else ""
        found.setdefault((line, rule), Finding(file, line, node.col_offset + 1, rule, text))

    try:
        Reader(tree, report).read()
    except RecursionError:
        found[(1, "unreadable")] = Finding(file, 1, 1, "unreadable", "nested too deeply")
    except Exception as error:  # ours; one file must not end the report on all others
        said = f"the checker failed: {type(error).__name__}: {error}"
        found[(1, "unreadable")] = Finding(file, 1, 1, "unreadable", said.splitlines()[0])
    return sorted(found.values())


def scan_file(path: Path, name: str | None = None) -> list[Finding]:
    """The findings of one file; one that can't be read as text is a finding, never an error."""
    name = name or str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        return [Finding(name, 1, 1, "unreadable", error.strerror or str(error))]
    try:
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        source = data.decode("latin-1")
    return scan_source(source.replace("\0", ""), name)


def python_files(paths: list[Path]) -> Iterator[Path]:
    """The Python files below the paths, without hidden folders and virtual environments."""
    for path in paths:
        if path.is_dir():
            for found in sorted(path.rglob("*.py")):
                parts = found.relative_to(path).parts
                if not any(
                    p.startswith(".") or p in ("site-packages", "node_modules") for p in parts
                ):
                    yield found
        else:
            yield path


def scan(paths: list[str | Path]) -> list[Finding]:
    """The findings of files and folders, by file and line; FileNotFoundError for a missing one."""
    todo = [Path(p) for p in paths]
    for path in todo:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give a Python file or a folder")
    return [finding for path in python_files(todo) for finding in scan_file(path)]
