"""From files to findings: read each as text, parse it, hand it to the reader."""

import ast
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from . import surroundings, transfer
from .imports import Project
from .packages import PACKAGES
from .reader import Reader
from .rules import ENVIRONMENT, RULES

# A file that mentions none of these can hold nothing the rules know: most files of a project.
WORTH_READING = re.compile(
    r"cud|nccl|nvidia|nvtx|flash_attn|apex|xformers|triton|float64|double|complex|polar|linspace"
    r"|torch\.ops|compile|load_library|Conv3d|conv3d|\.to\(|fork|float8|bitsandbytes|pynvml|from_numpy"
    r"|fft|stft|sdp|ReduceOp|premul|cpp_extension|transformer_engine|cupy|device|tensorrt|flashinfer|GPUtil|nvcc|_ssm|natten"
    r"|num_gpus|placement_group|linalg|matrix_exp|det\(|torch\.load|DataParallel|fused|flex_attention"
    r"|transfer_to_npu|_inductor|jit\.script|channels_last|import _C|_ext\b",
    re.IGNORECASE,
)


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
        if self.rule in ("cuda-env", "cuda-no-effect"):
            names = [name for name in ENVIRONMENT if re.search(rf"\b{name}\b", self.code)]
            if names:
                return ", ".join(f"{name}: {ENVIRONMENT[name]}" for name in names)
        if self.rule == "cuda-assert" and "type" in self.code:
            return "test `device.type != 'cpu'`, or name the accelerator's type too"
        if self.rule == "dependency":
            code = self.code.replace("_", "-")
            names = [n for n in PACKAGES if re.search(rf"(?<![\w-]){n}(?![\w-])", code)]
            if names:
                return ", ".join(f"{name}: {PACKAGES[name]}" for name in names)
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
    if not path.is_file():
        return [unreadable(name, "no regular file")]
    try:
        data = path.read_bytes()
    except OSError as error:
        return [unreadable(name, error.strerror or str(error))]
    if path.suffix in (*surroundings.CUDA_SOURCE, *surroundings.CPP):
        words = f"{data.count(10)} lines of {'C++ for ' * (path.suffix in surroundings.CPP)}CUDA"
        return [Finding(name, 1, 1, "cuda-source", words)]
    cells = surroundings.notebook(data) if path.suffix == ".ipynb" else None
    if path.suffix == ".ipynb" and cells is None:
        return [unreadable(name, "a notebook without code cells: make a script of it, check that")]
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return [unreadable(name, "UTF-16 text, which Python does not read: save it as UTF-8")]
    try:
        source = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        source = data.decode("latin-1")
    others = cells[1] if cells else []
    if cells:
        source = cells[0]
    elif surroundings.wanted(path):
        pins = bool(surroundings.PINS.fullmatch(path.name))
        return [Finding(name, n, 1, r, c) for n, r, c in surroundings.text_file(source, pins)]
    elif path.name == "setup.py":
        others = surroundings.setup_pins(source)
    found = [Finding(name, n, 1, r, c) for n, r, c in others]
    return sorted(
        found + scan_source(source.replace("\0", ""), name, path.suffix != ".py", project)
    )


def python_files(paths: list[Path]) -> Iterator[Path]:
    """The Python files below the paths, without hidden folders and virtual environments."""
    for path in paths:
        yield from _below(path, {".py"}) if path.is_dir() else [path]


def not_python(paths: list[Path]) -> Iterator[Path]:
    """What lies beside the Python files: pins, scripts, CUDA source, notebooks that name CUDA."""
    for path in paths:
        for found in _below(path, None) if path.is_dir() else []:
            try:
                data = found.read_bytes() if found.is_file() else b""
            except OSError:
                data = b""
            if found.suffix == ".ipynb" and data and b"cuda" not in data:
                continue
            if found.suffix in surroundings.CPP and not surroundings.IS_CUDA.search(data):
                continue
            yield found


def _below(folder: Path, suffixes: set[str] | None) -> Iterator[Path]:
    for found in sorted(folder.rglob("*")):
        mine = found.suffix in suffixes if suffixes else surroundings.wanted(found)
        if mine and not found.is_dir():
            parts = found.relative_to(folder).parts
            if not any(p.startswith(".") or p in ("site-packages", "node_modules") for p in parts):
                yield found


def scan(paths: list[str | Path], transferred: bool = False) -> list[Finding]:
    """The findings of files and folders, by file and line.

    Where transfer_to_npu is imported, or `transferred` says so, only what it does not rewrite.

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
    switch = re.compile(rb"TORCH_TRANSFER_TO_NPU\s*[= ]\s*[\"']?1")
    scripts = [p for p in files if p.suffix != ".py" and p.is_file() and surroundings.wanted(p)]
    everywhere = transferred or any(switch.search(p.read_bytes()) for p in scripts)
    covered = transfer.covered(project, everywhere)
    return [f for p in files for f in found[p] if str(p) not in covered or transfer.remains(f)]


def existing(paths: list[str | Path]) -> list[Path]:
    """The paths; FileNotFoundError, as a sentence, for one that is not there."""
    for path in paths:
        if str(path) == "" or not Path(path).exists():
            name = str(path) or "a path without a name"
            raise FileNotFoundError(f"{name} does not exist: give a Python file or a folder")
    return [Path(p) for p in paths]
