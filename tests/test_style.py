"""Rules of the repository that ruff does not know."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRACKED = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
).stdout.split("\0")
FILES = [ROOT / f for f in TRACKED if f and (ROOT / f).is_file()] or [
    p for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts and ".git" not in p.parts
]
PACKAGE = [p for p in FILES if p.is_relative_to(ROOT / "shardbook") and p.suffix == ".py"]
SOURCES = [p for p in FILES if p.suffix in (".py", ".js", ".md", ".yml", ".sh", ".toml")]


def names(paths):
    return [str(p.relative_to(ROOT)) for p in paths]


@pytest.mark.parametrize("path", PACKAGE, ids=names(PACKAGE))
def test_public_functions_are_typed(path):
    untyped = []
    for node in ast.parse(path.read_text()).body:
        found = [node] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        for function in found:
            if function.name.startswith("_"):
                continue
            a = function.args
            every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
            # by the protocols of Python, torch and the checks
            given = ("self", "cls", "ctx", "closure", "frame", "group", "answer", "report")
            bare = [x.arg for x in every if x.annotation is None and x.arg not in given]
            if bare and path.parent.name != "port":
                untyped.append(f"{function.name}({', '.join(bare)})")
    assert not untyped, f"no type hints: {', '.join(untyped)}"


def test_no_device_is_named():
    """The labs and the library ask sb.device(); only what finds devices may name them."""
    asks = {"devices.py", "doctor.py"}
    chosen = [p for p in PACKAGE if p.name not in asks and "port" not in p.parts]
    chosen += [p for p in FILES if p.is_relative_to(ROOT / "book") and p.suffix == ".py"]
    # what a customer hands over: chapter 44 is about the devices it names
    chosen = [p for p in chosen if "cuda_project" not in p.parts]
    named = re.compile(
        r"""\.cuda\(|\.npu\(|torch\.(cuda|npu)\.|device=["'](cuda|npu)|["'](nccl|hccl)["']"""
    )
    found = [
        f"{p.relative_to(ROOT)}:{i}: {line.strip()}"
        for p in chosen
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if named.search(line.split("#")[0]) and "port: example" not in line
    ]
    assert not found, "\n".join(found)


def test_no_path_of_a_machine_is_in_the_repository():
    home = re.compile(r"(?<![\w.])/(?:work|root|home/\w+)/[\w.]+")
    mine = Path(__file__).resolve()
    found = [
        f"{p.relative_to(ROOT)}: {m[0]}"
        for p in FILES
        if p.suffix in (".py", ".md", ".ipynb", ".sh", ".yml", ".toml", ".js", ".txt") and p != mine
        for m in home.finditer(p.read_text(errors="replace"))
    ]
    assert not found, "\n".join(found[:20])


def test_nothing_downloads_at_run_time():
    fetches = re.compile(
        r"urlretrieve|requests\.(get|post)|snapshot_download|hf_hub_download|load_dataset|"
        r"torch\.hub|wget |from_pretrained\("
    )
    chosen = [*PACKAGE, *(p for p in FILES if p.is_relative_to(ROOT / "book"))]
    chosen = [p for p in chosen if "port" not in p.parts and p.suffix == ".py"]
    found = [str(p.relative_to(ROOT)) for p in chosen if fetches.search(p.read_text())]
    assert not found


def test_text_files_are_clean():
    for path in SOURCES:
        text = path.read_text()
        assert ("\r" not in text and "\t" not in text) or path.suffix in (".sh", ".js"), path
        assert not re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE), f"{path}: a merge is left"


FOREIGN = {"torch", "multiprocessing", "IPython", "ipykernel"}


def private_names(text):
    """(line, dotted name) of each private name of another package that a module touches."""
    tree, bound = ast.parse(text), {}
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                root = a.name.split(".")[0]
                bound[a.asname or root] = a.name if a.asname else root
                imported.append((node.lineno, a.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for a in node.names:
                bound[a.asname or a.name] = f"{node.module}.{a.name}"
                imported.append((node.lineno, f"{node.module}.{a.name}"))
    used = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                names.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in bound:
                used.append((node.lineno, ".".join([bound[inner.id], *names])))
    return sorted(
        (line, name)
        for line, name in {*imported, *used}
        if name.split(".")[0] in FOREIGN
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    )


def test_private_names_are_found():
    code = (
        "import torch.nn as nn\nfrom torch import autograd as a\nimport torch._dynamo\n"
        "from multiprocessing import forkserver\nnn.Module._call_impl\na.graph.x\n"
        "forkserver._forkserver.pid\nself._own\ntorch.nn.__name__\n"
    )
    assert private_names(code) == [
        (3, "torch._dynamo"),
        (5, "torch.nn.Module._call_impl"),
        (7, "multiprocessing.forkserver._forkserver"),
        (7, "multiprocessing.forkserver._forkserver.pid"),
    ]


def test_private_names_of_other_packages_are_in_one_file():
    found = [
        f"{p.relative_to(ROOT)}:{line}: {name}"
        for p in PACKAGE
        if p.name != "_seams.py"
        for line, name in private_names(p.read_text())
    ]
    assert not found, "move these to shardbook/_seams.py, with the reason:\n" + "\n".join(found)


def test_the_palette_states_every_colour_of_a_picture():
    """tracing/palette.py; the rooms that draw name its colours, and black and white."""
    found = [
        f"{p.relative_to(ROOT)}: {colour}"
        for p in PACKAGE
        if {"pictures", "studies"} & set(p.parts)
        for colour in re.findall(r"""["']#[0-9a-fA-F]{3,8}["']|tab:\w+""", p.read_text())
    ]
    assert not found, "\n".join(found)
