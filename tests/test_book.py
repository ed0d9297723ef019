"""The book: notebooks are what their source gives, labs hold no solutions and run, the order."""

import ast
import re
import textwrap
from pathlib import Path

import nbformat
import pytest

from book import build, extract
from shardbook.chapters import CHAPTERS

pytestmark = pytest.mark.usefixtures("warm_kernels")
ROOT = Path(__file__).resolve().parent.parent
CHAPTER_DIRS = build.chapters([])
WITH_LAB = [c for c in CHAPTER_DIRS if (c / "lab.py").exists()]


def ids(paths):
    return [p.name for p in paths]


# The book as it is


@pytest.mark.parametrize("chapter", CHAPTER_DIRS, ids=ids(CHAPTER_DIRS))
def test_generated_is_what_the_source_gives(chapter):
    assert build.check(chapter) == []


def test_no_notebook_without_source():
    assert build.orphans() == []


@pytest.mark.slow
@pytest.mark.parametrize("chapter", WITH_LAB, ids=ids(WITH_LAB))
def test_an_unsolved_lab_runs_from_top_to_bottom(chapter):
    lab = nbformat.read(ROOT / "labs" / f"{chapter.name}.ipynb", as_version=4)
    build.execute(lab, 300, f"labs/{chapter.name}")
    text = {i: "".join(o.get("text", "") for o in c.get("outputs", [])) for i, c in _code(lab)}
    checked = [text[i] for i, c in _code(lab) if c.source.startswith("check.")]
    assert checked and all("is not written yet" in t for t in checked)
    assert not any("Traceback" in t or "✗" in t for t in text.values())
    assert not any(o.output_type == "error" for _, c in _code(lab) for o in c.outputs)


@pytest.mark.parametrize("chapter", WITH_LAB, ids=ids(WITH_LAB))
def test_a_solution_shows_the_verdict_of_every_check(chapter):
    """So the reference passes its check, in `make test` and on the stand-in npu."""
    solution = nbformat.read(ROOT / "solutions" / f"{chapter.name}.ipynb", as_version=4)
    checked = {
        name
        for _, cell in _code(solution)
        for name in re.findall(r"(?m)^check\.(\w+)\(", cell.source)
        if any("✓" in o.get("text", "") for o in cell.outputs)
    }
    number = int(chapter.name[:2])
    functions = _check_functions(number)
    assert functions and functions <= checked


def _check_functions(chapter: int) -> set[str]:
    """The names of a chapter's functions under ``@check``, as a lab calls them."""
    folder = ROOT / "shardbook" / "checks"
    found = set()
    for path in [
        *folder.glob(f"{CHAPTERS[chapter]}.py"),
        *folder.glob(f"{CHAPTERS[chapter]}/*.py"),
    ]:
        for node in ast.parse(path.read_text()).body:
            calls = [d for d in getattr(node, "decorator_list", []) if isinstance(d, ast.Call)]
            if any(getattr(d.func, "id", "") == "check" for d in calls):
                found.add(node.name)
    return found


def _code(book):
    return [(i, c) for i, c in enumerate(book.cells) if c.cell_type == "code"]


def _imports(path: Path) -> set[str]:
    """Modules of shardbook that a file imports, wherever it does."""
    text = path.read_text()
    if path.is_relative_to(ROOT / "book"):
        text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*[%!]", line))
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {module} | {f"{module}.{a.name}" for a in node.names}
    if "gather(globals())" in text:  # the modules of a folder of checks
        found |= {".".join([*package, p.stem]) for p in path.parent.glob("[!_]*.py")}
    return {m for m in found if m.startswith("shardbook.") and _file(m)}


def _file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def _reached(start: set[str]) -> set[str]:
    seen, queue = set(), list(start)
    while queue:
        module = queue.pop()
        if module not in seen:
            seen.add(module)
            queue += _imports(_file(module))
    return seen


# What a lesson tells one chapter before the lab in which it is written.
TOLD = {"shardbook.models.rope3d": 43}


def _taught() -> dict[str, int]:
    """Module -> the first chapter that tells it, or in whose lab an exercise lives there."""
    taught = dict(TOLD)
    for chapter in WITH_LAB:
        for names in re.findall(
            r'(?m)^# %%.*\bexercise="([^"]+)"', (chapter / "lab.py").read_text()
        ):
            for dotted in names.split():
                taught.setdefault(dotted.rsplit(".", 1)[0], int(chapter.name[:2]))
    return taught


@pytest.mark.parametrize("chapter", CHAPTER_DIRS, ids=ids(CHAPTER_DIRS))
def test_a_chapter_imports_only_what_came_before(chapter):
    taught, number = _taught(), int(chapter.name[:2])
    sources = [p for p in (chapter / "lesson.py", chapter / "lab.py") if p.exists()]
    start = set().union(*map(_imports, sources)) | {m for m, n in taught.items() if n == number}
    if number == 0:  # the first page shows a check at work
        start -= {"shardbook.checks.tensors"}
    later = {m: n for m, n in taught.items() if n > number}
    early = sorted(f"{m} ({later[m]})" for m in _reached(start) & set(later))
    assert not early, f"{chapter.name} uses what a later chapter teaches: {', '.join(early)}"


@pytest.mark.parametrize("module", TOLD)
def test_a_lesson_tells_what_the_next_lab_asks_for(module):
    (chapter,) = (c for c in CHAPTER_DIRS if c.name.startswith(str(TOLD[module])))
    lesson = (chapter / "lesson.py").read_text()
    assert re.search(rf"(?m)^from {re.escape(module)} import|^import {re.escape(module)}", lesson)


def test_the_ground_knows_nothing_of_the_chapters():
    ground = ["devices", "calls", "ranks", "notebook", "pictures.plot", "tracing", "basics.tiny"]
    reached = _reached({f"shardbook.{m}" for m in ground if _file(f"shardbook.{m}")})
    assert not reached & set(_taught())


@pytest.mark.parametrize("chapter", WITH_LAB, ids=ids(WITH_LAB))
def test_a_check_does_not_import_the_reference_it_judges(chapter):
    folder = ROOT / "shardbook" / "checks"
    paths = [folder / f"{chapter.name[3:]}.py", *folder.glob(f"{chapter.name[3:]}/*.py")]
    names = re.findall(r'(?m)^# %%.*\bexercise="([^"]+)"', (chapter / "lab.py").read_text())
    exercises = {dotted for found in names for dotted in found.split()}
    found = set()
    for path in filter(Path.exists, paths):
        found |= _imports(path)
        found |= set(re.findall(r"""import_module\(["']([\w.]+)""", path.read_text()))
    modules = {e.rsplit(".", 1)[0] for e in exercises}
    assert not found & (exercises | modules), "an oracle must not be our own reference"


# A lab shows the trace of what the learner wrote

TRACES = re.compile(
    r"\b(sb\.(trace|show)|virtual_trace)\(|\btrace=True\b|(?m:^%%ranks\b.*--trace\b)"
)
NO_TRACE: set[str] = set()
"""Labs that trace nothing of the learner's yet. Leave it empty."""


def traced_exercises(book: nbformat.NotebookNode) -> set[str]:
    """The exercises whose answer runs in a cell that traces: called there, or by what it calls."""
    calls: dict[str, set[str]] = {}  # a name that cells define -> the names its definition uses
    exercises, found = set(), set()
    for _, cell in _code(book):
        text = "\n".join(s for s in cell.source.splitlines() if not re.match(r"\s*[%!]", s))
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                calls[node.name] = _names_in(node)
            elif isinstance(node, ast.Assign):
                for name in set().union(*map(_names_in, node.targets)):
                    calls[name] = calls.get(name, set()) | _names_in(node.value)
        exercises |= {_plain(n) for n in re.findall(r"(?m)^check\.(\w+)\(", cell.source)}
        if TRACES.search(cell.source):
            found |= _names_in(tree)
    queue = list(found)
    while queue:
        new = calls.get(queue.pop(), set()) - found
        found |= new
        queue += new
    return {n for n in found if n in calls and _plain(n) in exercises}


def _names_in(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _plain(name: str) -> str:
    return name.replace("_", "").lower()  # check.dit_block looks at DiTBlock


@pytest.mark.parametrize("kind", ["labs", "solutions"])
@pytest.mark.parametrize("chapter", WITH_LAB, ids=ids(WITH_LAB))
def test_a_lab_shows_the_trace_of_what_the_learner_wrote(chapter, kind):
    book = nbformat.read(ROOT / kind / f"{chapter.name}.ipynb", as_version=4)
    found = traced_exercises(book)
    if chapter.name in NO_TRACE:
        assert not found, f"{chapter.name} traces {sorted(found)}: take it out of NO_TRACE"
        return
    assert found, (
        f"no cell of {kind}/{chapter.name}.ipynb runs an exercise under sb.trace, sb.show, "
        "trace=True or %%ranks --trace: end the lab with the trace of the learner's own code"
    )


NO_WORDS: set[str] = set()
"""Chapters whose stored pictures are older than their words: `book/build.py --all NN` adds them."""


@pytest.mark.parametrize("kind", ["notebooks", "solutions"])
@pytest.mark.parametrize("chapter", CHAPTER_DIRS, ids=ids(CHAPTER_DIRS))
def test_every_stored_picture_says_what_it_shows(chapter, kind):
    path = ROOT / kind / f"{chapter.name}.ipynb"
    if chapter.name[:2] in NO_WORDS or not path.exists():
        return
    pictures = [o for _, c in _code(nbformat.read(path, as_version=4)) for o in c.outputs]
    pictures = [o for o in pictures if "image/png" in o.get("data", {})]
    words = [o.metadata.get("image/png", {}).get("alt", "") for o in pictures]
    assert all(len(w) > 10 for w in words), f"{path.name}: alternative texts are {words}"


def test_every_chapter_is_on_the_map():
    start = (ROOT / "book" / "00_start_here" / "lesson.py").read_text()
    linked = set(re.findall(r"\(((?!00)\d\d_\w+)\.ipynb\)", start))
    assert linked == {c.name for c in CHAPTER_DIRS} - {"00_start_here"}
    assert {c.name[3:] for c in WITH_LAB} <= set(CHAPTERS.values())
    readme = (ROOT / "README.md").read_text()
    for chapter in CHAPTER_DIRS:
        assert f"notebooks/{chapter.name}.ipynb" in readme, f"README has no {chapter.name}"


# The build, on a book of its own

REFERENCE = '''
import torch


@torch.no_grad()
def twice(x: int) -> int:
    """Two times x."""
    # a remark that gives it away
    doubled = x + x

    return doubled  # done


def one(x): return x + 1


class Scale(torch.nn.Module):
    """Multiplies by a constant."""

    def __init__(self, by: float):
        super().__init__()
        self.by = by
        # kept: it belongs to __init__

    @property
    def factor(self) -> float:
        return self.by

    def forward(self, x):
        # before the code
        product = x * self.factor
        return product
        # after the code
'''

CHECKS = """
from .framework import check, same


@check("twice")
def twice(answer, report):
    with report.property("doubles", hint="add it to itself"):
        same(answer(21), 42, "twice(21)")


@check("one")
def one(answer, report): ...


@check("Scale")
def scale(answer, report): ...
"""

LESSON = """
# %% [markdown]
# # 11 · Toy

# %%
print("a", end=" ")
print("b")

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.show()
"""

LAB = """
# %% [markdown]
# # 11 · Toy lab

# %%
import shardbook as sb
import torch

# %% [markdown]
# ## Exercise 1: twice

# %% exercise="shardbook.toy.twice shardbook.toy.one"

# %%
print(twice(4))

# %%
def on_ranks():
    return twice(4)
print(sb.run(on_ranks, world_size=2).values)

# %% predict="predicted"
predicted = 2 * 3  # two threes
sb.predict("six", predicted, 6, "bytes")

# %% [markdown]
# ## Exercise 2: scale

# %% exercise="shardbook.toy.Scale" blank="forward"

# %%
Scale(3.0)(torch.ones(2))

# %%
print("the end")
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository with one small chapter; its notebooks are not built yet."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(extract, "ROOT", tmp_path)
    for path, text in {
        "shardbook/toy.py": REFERENCE,
        "shardbook/checks/toy.py": CHECKS,
        "book/11_toy/lesson.py": LESSON,
        "book/11_toy/lab.py": LAB,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text.lstrip())
    return tmp_path


def cells(path: Path) -> list[str]:
    return [c.source for c in nbformat.read(path, as_version=4).cells]


def test_build_and_check_a_chapter(toy, capsys):
    assert build.main(["11"]) == 0, capsys.readouterr().err
    assert build.main(["--check"]) == 0, capsys.readouterr().err
    lab, solution = cells(toy / "labs/11_toy.ipynb"), cells(toy / "solutions/11_toy.ipynb")
    twice = next(c for c in lab if "def twice" in c)
    assert (
        twice
        == textwrap.dedent('''
        @torch.no_grad()
        def twice(x: int) -> int:
            """Two times x."""
            # TODO
            raise NotImplementedError("exercise 1: twice is not written yet")


        def one(x):
            # TODO
            raise NotImplementedError("exercise 1: one is not written yet")
        ''').strip()
    )
    scale = next(c for c in lab if "class Scale" in c)
    assert "return self.by" in scale and "# kept" in scale and "product" not in scale
    assert "before the code" not in scale and "after the code" not in scale
    assert scale.endswith('raise NotImplementedError("exercise 2: Scale is not written yet")')
    assert any("predicted = None  # your prediction" in c for c in lab)
    assert any("predicted = 2 * 3  # two threes" in c for c in solution)
    assert any("return doubled  # done" in c for c in solution)
    assert "../labs/11_toy.ipynb" in cells(toy / "notebooks/11_toy.ipynb")[1]

    lesson = nbformat.read(toy / "notebooks/11_toy.ipynb", as_version=4)
    assert [o.output_type for _, c in _code(lesson) for o in c.outputs] == [
        "stream",
        "display_data",
    ], "streams are merged and a figure leaves its picture only"
    assert lesson.cells[2].outputs[0].text == "a b\n"
    assert "execution" not in lesson.cells[2].metadata
    assert "version" not in lesson.metadata.language_info
    answers = nbformat.read(toy / "solutions/11_toy.ipynb", as_version=4)
    printed = "".join(o.get("text", "") for _, c in _code(answers) for o in c.outputs)
    assert "[8, 8]" in printed and "six: predicted 6 bytes, measured 6 bytes ✓" in printed

    before = {p: p.read_bytes() for p in toy.glob("*/*.ipynb")}
    assert build.main(["--all"]) == 0
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path.name} differs when it is built again"
    capsys.readouterr()
    assert build.main([]) == 0
    assert "wrote" not in capsys.readouterr().out, "nothing changed, so nothing is built"

    unsolved = nbformat.read(toy / "labs/11_toy.ipynb", as_version=4)
    build.execute(unsolved, 60, "labs/11_toy")
    outputs = ["".join(o.get("text", "") for o in c.outputs) for _, c in _code(unsolved)]
    assert outputs[2:] == [
        "exercise 1: twice is not written yet\n",
        "exercise 1: twice is not written yet\n",  # met by the ranks
        "six: write your prediction first, then run this cell again\n",
        "",
        "exercise 2: Scale is not written yet\n",
        "the end\n",
    ]


@pytest.fixture
def built(toy):
    """The toy chapter with notebooks that look executed, without a kernel."""
    for kind, book in build.notebooks(toy / "book/11_toy").items():
        for i, (_, cell) in enumerate(_code(book)):
            cell.execution_count = i + 1 if kind != "labs" else None
        (toy / kind).mkdir()
        nbformat.write(book, toy / kind / "11_toy.ipynb")
    assert build.check(toy / "book/11_toy") == []
    return toy


def problems(toy) -> str:
    return "\n".join(build.check(toy / "book/11_toy"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        ("book/11_toy/lesson.py", "Toy", "Tiny", "notebooks/11_toy.ipynb is not what its source"),
        ("book/11_toy/lab.py", "the end", "over", "solutions/11_toy.ipynb is not what its source"),
        ("shardbook/toy.py", "x + x", "2 * x", "solutions/11_toy.ipynb is not what its source"),
        ("labs/11_toy.ipynb", "the end", "edited", "labs/11_toy.ipynb is not what its source"),
        ("notebooks/11_toy.ipynb", '"execution_count": 2', '"execution_count": 9', "top to bottom"),
        ("labs/11_toy.ipynb", '"outputs": []', '"outputs": [{"output_type": "stream", "name": '
         '"stdout", "text": "hi"}]', "holds outputs"),
        ("book/11_toy/lab.py", 'print("the end")', "doubled = x + x\n    return doubled",
         "shows the solution of twice"),
        ("book/11_toy/lab.py", 'print("the end")', "from shardbook.toy import twice",
         "imports twice"),
        ("book/11_toy/lab.py", 'print("the end")', "from shardbook.toy import (\n  Scale as S,\n)",
         "imports Scale"),
        ("book/11_toy/lab.py", 'print("the end")', "import shardbook.toy\nshardbook.toy.twice(2)",
         "names shardbook.toy.twice"),
        ("shardbook/checks/toy.py", '@check("Scale")', "", "has no check of Scale"),
        ("book/11_toy/lab.py", "shardbook.toy.twice shardbook.toy.one", "shardbook.toy.one",
         "has no exercise twice"),
    ],
)  # fmt: skip
def test_check_tells_what_does_not_fit(built, path, old, new, says):
    edit(built / path, old, new)
    assert says in problems(built)


def test_check_tells_what_is_missing_too_large_or_left_over(built, monkeypatch, capsys):
    (built / "notebooks/77_gone.ipynb").write_text("{}")
    assert build.main(["--check"]) == 1
    assert "notebooks/77_gone.ipynb has no source" in capsys.readouterr().err
    monkeypatch.setattr(build, "LIMIT", (1000, 60))
    assert "the limit is 1,000" in problems(built)
    (built / "solutions/11_toy.ipynb").unlink()
    assert "solutions/11_toy.ipynb does not exist" in problems(built)
    assert build.main(["--check", "55"]) == 1
    assert "no chapter 55" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('blank="forward"', 'blank="backward"', 'blank="backward" is in none'),
        ("shardbook.toy.Scale", "shardbook.toy.Sacle", "defines no Sacle"),
        ("shardbook.toy.Scale", "shardbook.tyo.Scale", "there is no shardbook/tyo.py"),
        ('blank="forward"', 'blink="forward"', "blink is not known"),
        ('predict="predicted"', 'predict="guess"', 'has no line "guess = …"'),
    ],
)
def test_a_source_that_cannot_be_built_is_said(toy, capsys, old, new, says):
    edit(toy / "book/11_toy/lab.py", old, new)
    assert build.main(["--check"]) == 1
    assert says in capsys.readouterr().err


def test_a_cell_that_fails_leaves_the_notebook_as_it_was(built, capsys):
    before = (built / "notebooks/11_toy.ipynb").read_bytes()
    edit(built / "book/11_toy/lesson.py", 'print("b")', "undefined_name")
    assert build.main(["11"]) == 1
    said = capsys.readouterr().err
    assert "notebooks/11_toy.ipynb: cell 3 failed" in said
    assert "NameError: name 'undefined_name' is not defined" in said and "\x1b" not in said
    assert (built / "notebooks/11_toy.ipynb").read_bytes() == before


def test_a_solution_that_fails_its_check_is_no_solution():
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("check.twice(twice)")])
    for text, holds in [("✓ doubles\n", True), ("✓ a\n✗ b\n", False), ("✎ not\n", False)]:
        book.cells[0].outputs = [nbformat.v4.new_output("stream", text=text)]
        if holds:
            build._all_hold(book, "solutions/x")
        else:
            with pytest.raises(build.Failed, match="does not pass"):
                build._all_hold(book, "solutions/x")


def test_only_unwritten_exercises_are_forgiven_in_a_cell():
    from nbclient import NotebookClient

    sources = [
        "import shardbook as sb",
        "raise NotImplementedError('exercise 7: it is not written yet')",
        "raise NotImplementedError('another matter')",
        "1 / 0",
        "import asyncio\nawait asyncio.sleep(0)\n"
        "raise NotImplementedError('exercise 8: x is not written yet')",
        "print('on')",
    ]
    new = nbformat.v4.new_code_cell
    book = nbformat.v4.new_notebook(cells=[new(s) for s in sources])
    NotebookClient(book, allow_errors=True, kernel_name="python3").execute()
    kinds = [
        [(o.output_type, o.get("text", o.get("ename"))) for o in c.outputs] for c in book.cells
    ]
    assert kinds == [
        [],
        [("stream", "exercise 7: it is not written yet\n")],
        [("error", "NotImplementedError")],
        [("error", "ZeroDivisionError")],
        [("stream", "exercise 8: x is not written yet\n")],
        [("stream", "on\n")],
    ]
