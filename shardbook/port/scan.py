"""From files to findings: read each as text, parse it, hand it to the reader."""

import ast
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from .imports import Project
from .reader import Reader
from .rules import ENVIRONMENT, RULES

# A file that mentions none of these can hold nothing the rules know: most files of a project.
WORTH_READING = re.compile(
    r"cud|nccl|nvidia|nvtx|flash_attn|apex|xformers|triton|float64|double|complex|polar|linspace"
    r"|torch\.ops|compile|load_library|Conv3d|conv3d|\.to\(|fork|float8|bitsandbytes|pynvml|from_numpy"
    r"|fft|stft|sdp|ReduceOp|premul|cpp_extension|transformer_engine|cupy|device|tensorrt|flashinfer|GPUtil|nvcc|_ssm|natten"
    r"|num_gpus|placement_group|linalg|matrix_exp|det\(|torch\.load|DataParallel|fused|flex_attention"
    r"|_inductor|jit\.script|channels_last|import _C|_ext\b",
    re.IGNORECASE,
)


CUDA_SOURCE = (".cu", ".cuh")
DEEP = "nested too deeply: it was not checked from there on"


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """One place in one file. Line and column as editors count them: from 1."""

    file: str
    line: int
    column: int
    rule: str
    code: str
    cause: str = ""  # the place it follows from: mended there, it is gone

    @property
    def severity(self) -> str:
        """breaks, wrong, slow or style."""
        return RULES[self.rule].severity

    @property
    def instead(self) -> str:
        """What to write: the rule's words, or the twin of the variable that this line names."""
        if self.rule == "cuda-env":
            names = [name for name in ENVIRONMENT if re.search(rf"\b{name}\b", self.code)]
            if names:
                return ", ".join(f"{name}: {ENVIRONMENT[name]}" for name in names)
        return RULES[self.rule].instead


def scan_source(
    source: str, file: str = "<string>", always: bool = False, project: Project | None = None
) -> list[Finding]:
    """The findings of one file's text, in order; a file that is no Python 3 is one finding.

    A text without a word of any rule is not even parsed, unless `always`. `project` is what the
    other files tell this one, and is told what this one holds.
    """
    skipped = not always and not WORTH_READING.search(source)
    if skipped and (project is None or project.skip(file, source)):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except SyntaxError as error:
        return [unreadable(file, error.msg or "invalid syntax", error.lineno or 1)]
    except (RecursionError, MemoryError):
        return [unreadable(file, DEEP)]
    except ValueError as error:
        return [unreadable(file, str(error))]
    lines = re.split("\r\n|\r|\n", source)  # as Python counts them: a form feed ends no line
    found: dict[tuple[int, str], Finding] = {}

    def report(node: ast.AST, rule: str, cause: str = "") -> None:
        line = getattr(node, "lineno", 1)
        text = lines[line - 1].strip() if line <= len(lines) else ""
        new = Finding(file, line, node.col_offset + 1, rule, text, cause)
        if (line, rule) not in found or (found[line, rule].cause and not cause):
            found[line, rule] = new

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 12_000))  # a level of code takes a few calls here
    reader = Reader(tree, report, project and project.around(file))
    try:
        reader.read()
    except RecursionError:
        found[(1, "unreadable")] = unreadable(file, DEEP)
    except Exception as error:  # ours; one file must not end the report on all others
        said = f"the checker failed: {type(error).__name__}: {error}"
        found[(1, "unreadable")] = unreadable(file, said)
    finally:
        sys.setrecursionlimit(limit)
    if project:
        project.learn(file, reader)
    return sorted(found.values())


def unreadable(file: str, why: str, line: int = 1) -> Finding:
    """The finding for a file, or the rest of it, that was not checked."""
    return Finding(file, line, 1, "unreadable", (why.splitlines() or ["not readable"])[0])


def scan_file(path: Path, project: Project | None = None) -> list[Finding]:
    """The findings of one file; one that can't be read as text is a finding, never an error."""
    name = str(path)
    if path.suffix == ".ipynb":
        return [
            unreadable(name, "a notebook: make a script of it (jupytext --to py) and check that")
        ]
    if path.suffix in CUDA_SOURCE:
        return [unreadable(name, "CUDA source: an NPU needs it as torch ops or an Ascend C op")]
    if not path.is_file():
        return [unreadable(name, "no regular file")]
    try:
        data = path.read_bytes()
    except OSError as error:
        return [unreadable(name, error.strerror or str(error))]
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return [unreadable(name, "UTF-16 text, which Python does not read: save it as UTF-8")]
    try:
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        source = data.decode("latin-1")
    return scan_source(source.replace("\0", ""), name, path.suffix != ".py", project)


def python_files(paths: list[Path]) -> Iterator[Path]:
    """The Python files below the paths, without hidden folders and virtual environments."""
    for path in paths:
        yield from _below(path, {".py"}) if path.is_dir() else [path]


def not_python(paths: list[Path]) -> Iterator[Path]:
    """What lies beside the Python files and was written for CUDA: kernels, and such notebooks."""
    for path in paths:
        for found in _below(path, {".ipynb", *CUDA_SOURCE}) if path.is_dir() else []:
            try:
                if found.suffix != ".ipynb" or b"cuda" in found.read_bytes():
                    yield found
            except OSError:
                yield found


def _below(folder: Path, suffixes: set[str]) -> Iterator[Path]:
    for found in sorted(folder.rglob("*")):
        if found.suffix in suffixes and not found.is_dir():
            parts = found.relative_to(folder).parts
            if not any(p.startswith(".") or p in ("site-packages", "node_modules") for p in parts):
                yield found


def scan(paths: list[str | Path]) -> list[Finding]:
    """The findings of files and folders, by file and line.

    FileNotFoundError for a path that is missing, and where there is no file to read.
    """
    given = existing(paths)
    files = [*python_files(given), *not_python(given)]
    if not files:
        names = ", ".join(map(str, given))
        raise FileNotFoundError(f"{names} holds no Python file: nothing was checked")
    files.sort()
    project = Project(files)
    found = {path: scan_file(path, project) for path in files}
    for path in project.again():  # a file that it imports from holds something of CUDA's
        found[path] = scan_file(path, project)
    return [finding for path in files for finding in found[path]]


def existing(paths: list[str | Path]) -> list[Path]:
    """The paths; FileNotFoundError, as a sentence, for one that is not there."""
    for path in paths:
        if str(path) == "" or not Path(path).exists():
            name = str(path) or "a path without a name"
            raise FileNotFoundError(f"{name} does not exist: give a Python file or a folder")
    return [Path(p) for p in paths]
