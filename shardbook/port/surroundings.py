"""What lies around the Python files: pins, shell scripts, Dockerfiles, notebooks, CUDA source."""

import json
import re
from pathlib import Path

from .packages import PACKAGES
from .rules import ENVIRONMENT

CUDA_SOURCE = (".cu", ".cuh")
CPP = (".cpp", ".cc", ".cxx", ".h", ".hpp")
SHELL = (".sh", ".bash", ".slurm", ".sbatch")
PINS = re.compile(r"(requirements.*\.(txt|in)|pyproject\.toml|setup\.cfg|environment.*\.ya?ml)")
DOCKER = re.compile(r"(Dockerfile|Containerfile)(\..*)?|.*\.[Dd]ockerfile")
IS_CUDA = re.compile(
    rb"cuda_runtime|ATen/cuda|at::cuda|c10/cuda|__global__|cublas|cudnn|TORCH_CUDA"
)

_VARIABLE = re.compile(rf"\b({'|'.join(ENVIRONMENT)}|(?:TORCH_)?NCCL_[A-Z0-9_]+)(?==|\s+\S)")
_TOOL = re.compile(r"(?:^|[\s;|&(`])(nvidia-smi|nvcc|nsys|ncu|nvprof)\b")
_IMAGE = re.compile(
    r"^FROM\s+(nvidia/|nvcr\.io/|pytorch/pytorch\S*cuda)|--gpus[ =]|--runtime[ =]nvidia"
)
_NAMES = "|".join(re.escape(n) for n in sorted(PACKAGES, key=len, reverse=True))
_PACKAGE = re.compile(rf"(?:^|[\s\"'/\[=])({_NAMES})(?=$|[\s\"'\],;=<>~!@\[])")
_TORCH = re.compile(r"(?:^|[\s\"'])torch\s*(?:==|~=|<=|<|=)\s*v?\d")
_WHEELS = re.compile(r"/whl/cu\d|\+cu\d{2}")


def wanted(path: Path) -> bool:
    """Whether a file beside the Python files is read."""
    name, suffix = path.name, path.suffix
    if suffix in (".ipynb", *CUDA_SOURCE, *SHELL) or PINS.fullmatch(name) or DOCKER.fullmatch(name):
        return True
    return suffix in CPP


def text_file(text: str, pins: bool) -> list[tuple[int, str, str]]:
    """(line, rule, code) of a requirements file (`pins`), a shell script or a Dockerfile."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("#", 1)[0] if not _WHEELS.search(line) else line
        rules = pin(code) if pins or "install" in code else []
        if not pins:
            rules += ["cuda-env"] if _VARIABLE.search(code) else []
            rules += ["nvidia-tool"] if _TOOL.search(code) else []
            rules += ["dependency"] if _IMAGE.search(code) else []
        found += [(number, rule, line.strip()) for rule in dict.fromkeys(rules)]
    return found


def pin(code: str) -> list[str]:
    """The rules that a line with requirements meets."""
    rules = ["dependency"] if _PACKAGE.search(code.replace("_", "-")) else []
    rules += ["dependency"] if _WHEELS.search(code) else []
    return rules + (["torch-pin"] if _TORCH.search(code) else [])


def setup_pins(source: str) -> list[tuple[int, str, str]]:
    """The requirements that a setup.py names, as strings."""
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        strings = re.findall(r"[\"']([^\"']+)[\"']", line.split("#", 1)[0])
        for rule in dict.fromkeys(r for s in strings if "." not in s[:2] for r in pin(s)):
            found.append((number, rule, line.strip()))
    return found


def notebook(data: bytes) -> tuple[str, list[tuple[int, str, str]]] | None:
    """The code of a notebook as one text, and what its shell lines hold; None if it has no code."""
    try:
        cells = json.loads(data)["cells"]
        sources = [c["source"] for c in cells if c.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    lines: list[str] = []
    found: list[tuple[int, str, str]] = []
    for source in sources:
        text = source if isinstance(source, str) else "".join(source)
        if text.lstrip().startswith("%%"):
            continue  # a cell in another language
        for line in text.splitlines():
            bare = line.lstrip()
            if bare.startswith(("!", "%")):
                found += [(len(lines) + 1, r, bare) for _, r, _ in text_file(bare[1:], False)]
                line = line[: len(line) - len(bare)] + "pass"
            lines.append(line)
    return ("\n".join(lines) + "\n", found) if sources else None
