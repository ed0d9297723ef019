"""The rooms of the library: who may import whom, how long a file is, what an import costs.

Read from the source with ast, so an import inside a function counts like one at the top.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "shardbook"
FILES = sorted(LIBRARY.rglob("*.py"))

# What a room may import besides itself. "root" are the leaves beside the rooms.
GROUND = {"root", "ranks", "tracing"}
TAUGHT = {  # the parts of the book; test_book.py holds the order of the chapters among them
    *("basics", "parallel", "attention", "serving", "compress", "graphs", "align", "models"),
    *("evaluation", "cluster"),
}
KNOWS = {
    "root": set(),
    "tracing": {"root"},
    "ranks": {"root", "tracing"},
    "notebook": GROUND,
    "port": {"root"},
    "parity": GROUND,
    **{room: GROUND | TAUGHT for room in TAUGHT},
    "pictures": GROUND | TAUGHT,
    "studies": GROUND | TAUGHT | {"pictures"},
    "checks": GROUND | TAUGHT | {"notebook", "port", "parity", "pictures", "studies"},
}
DOORS = {LIBRARY / "__init__.py", LIBRARY / "__main__.py"}  # what users type: they open every room
MOST_IN_ROOT = 8  # modules beside the two doors


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(p): p for p in FILES}


def room_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY).parts
    return parts[0] if len(parts) > 1 else "root"


@cache
def named(path: Path) -> frozenset[str]:
    """The library's modules whose full name a file writes as a string: to import or preload."""
    strings = [
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
    ]
    return frozenset(s for s in strings if isinstance(s, str) and s in MODULES and "." in s)


@cache
def imports(path: Path) -> frozenset[str]:
    """The library's modules that a file imports, wherever in it."""
    package = name_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {n if (n := f"{module}.{a.name}") in MODULES else module for a in node.names}
    return frozenset(m for m in found if m in MODULES) - {name_of(path)}


def test_every_room_has_a_place():
    unknown = {room_of(p) for p in FILES} - set(KNOWS)
    assert not unknown, f"say in KNOWS what the room {', '.join(sorted(unknown))} may import"


@pytest.mark.parametrize("room", sorted({room_of(p) for p in FILES} & set(KNOWS)))
def test_arrows_go_down(room):
    wrong = [
        f"{p.relative_to(ROOT)} imports {m}"
        for p in FILES
        if room_of(p) == room and p not in DOORS
        for m in sorted(imports(p) | named(p))
        if room_of(MODULES[m]) not in KNOWS[room] | {room} or MODULES[m] in DOORS
    ]
    assert not wrong, "\n".join(wrong)


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """What remains when everything that imports nothing left is taken away, and so on."""
    left = dict(arrows)
    while done := [a for a, to in left.items() if not to & set(left)]:
        for a in done:
            del left[a]
    return sorted(left)


def test_rooms_have_no_circle():
    arrows: dict[str, set[str]] = {}
    for p in set(FILES) - DOORS:
        arrows.setdefault(room_of(p), set())
        arrows[room_of(p)] |= {room_of(MODULES[m]) for m in imports(p)} - {room_of(p)}
    assert circles(arrows) == []


def test_modules_have_no_circle():
    arrows = {name_of(p): set(imports(p)) for p in set(FILES) - DOORS}
    assert circles(arrows) == []


def test_the_root_stays_small():
    root = {p.name for p in LIBRARY.glob("*.py")} - {p.name for p in DOORS}
    assert len(root) <= MOST_IN_ROOT, f"a room of its own for one of {', '.join(sorted(root))}"


def loaded(*command: str) -> set[str]:
    """Top-level packages that a Python command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 2), done.stderr[-2000:]
    return {m.split(".")[0] for m in re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE)}


def test_importing_the_library_loads_no_torch():
    found = loaded("-c", "import shardbook")
    assert "shardbook" in found and not found & {"torch", "numpy", "libcst", "IPython"}


def test_the_command_line_starts_light():
    found = loaded("-m", "shardbook")
    assert "shardbook" in found and not found & {"torch", "libcst"}


# Files

LIMITS = {"checks": 350}  # lines; 300 elsewhere
EXCUSE = re.compile(r"\blong because\b")

# Being split; nothing may be added, and what has become short leaves the list.
TOO_LONG = {
    "checks/diffusion.py",
    "checks/flash_attention.py",
    "checks/tensors.py",
    "checks/tracing.py",
}


def limit_of(path: Path) -> int:
    return LIMITS.get(room_of(path), 300)


def excused(path: Path) -> bool:
    """The opening docstring or comment says why the file is long."""
    text = path.read_text()
    if path.suffix == ".py":
        return bool(EXCUSE.search(ast.get_docstring(ast.parse(text)) or ""))
    opening = re.match(r"(?:\s*//[^\n]*\n)+|\s*/\*.*?\*/", text, re.DOTALL)
    return bool(opening and EXCUSE.search(opening[0]))


def test_a_file_is_one_idea():
    long = {
        str(p.relative_to(LIBRARY))
        for p in [*FILES, *LIBRARY.rglob("*.js")]
        if len(p.read_text().splitlines()) > limit_of(p) and not excused(p)
    }
    assert not long - TOO_LONG, f"split, or say why in the opening: {sorted(long - TOO_LONG)}"
    assert not TOO_LONG - long, f"short now, take off the list: {sorted(TOO_LONG - long)}"
