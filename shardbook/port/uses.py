"""Uses of what was imported from a CUDA library or a compiled module, here or by another file.

The import is the cause; a use that is not a plain call in the same file follows from it.
"""

import ast
import dataclasses
import re

from .rules import CUDA_LIBRARIES
from .values import Value, Values

COMPILED = "compiled module "  # begins the dotted name of what a CUDA extension holds
COMPILED_NAME = re.compile(r"(_C|.*_cuda|.*_cuda_\w+|.*_cuda_kernels?|.*_cuda_ext)")


@dataclasses.dataclass
class Around:
    """What the other files of a project tell one of them."""

    names: dict[tuple[str, str], Value] = dataclasses.field(default_factory=dict)
    origin: dict[str, str] = dataclasses.field(default_factory=dict)  # library -> place of import
    optional: set[str] = dataclasses.field(default_factory=set)
    compiled: set[str] = dataclasses.field(default_factory=set)  # names of CUDAExtensions
    modules: set[str] = dataclasses.field(default_factory=set)  # that are files of the project


def library(path: str) -> str | None:
    """The CUDA library or compiled module that a dotted name belongs to."""
    parts = path.split(".")
    if parts[0] in CUDA_LIBRARIES or path.startswith(COMPILED):
        return parts[0]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in CUDA_LIBRARIES else None


def is_compiled(reader, module: str, name: str | None) -> str | None:
    """The name of the compiled CUDA module that an import statement loads."""
    full = f"{module.lstrip('.')}.{name}" if name else module.lstrip(".")
    if full.startswith(("torch.", "torch_npu", "torchvision")) or full == "torch":
        return None
    for part in (full, module.lstrip(".")):
        last = part.rpartition(".")[2]
        if part and part in reader.around.compiled:
            return last
        name_of_module = part != full or not name or last == "_C" or not module.lstrip(".")
        known = last in reader.around.modules  # a Python file of the project
        if name_of_module and last and COMPILED_NAME.fullmatch(last) and not known:
            return last
    return None


def used(reader, node: ast.AST, path: str, called: bool) -> None:
    """A name of a CUDA library or of a compiled module is used."""
    name = library(path)
    if name is None or (reader.choosing and not called):
        return
    place = reader.origin.get(name, "")
    elsewhere = ":" in place
    optional = name in reader.optional
    if name.startswith(COMPILED):
        reader.report(node, "cuda-extension", "" if called and not elsewhere else place)
    elif reader.guarded or optional:
        if not reader.choosing and place:
            reader.report(node, "optional-cuda-library", place)
    elif called or place:
        reader.report(node, "cuda-library", "" if called and not elsewhere else place)


def name_read(reader, node: ast.Name, values: Values) -> None:
    """A plain name is read, and not called: handed on, assigned, a base class."""
    if getattr(node, "prefix", False) or (reader.chain and reader.chain[-1] is node):
        return
    libraries = [v for v in values if v.kind == "mod" and library(v.data)]
    if libraries and len(libraries) == len(values) and not reader.choosing:
        used(reader, node, libraries[0].data, called=False)
