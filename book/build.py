"""Build the notebooks: ``python book/build.py [NN…]`` from book/NN_name/lesson.py and lab.py.

    notebooks/NN_name.ipynb   lesson.py, executed
    solutions/NN_name.ipynb   lab.py with the references' source, executed
    labs/NN_name.ipynb        lab.py with the exercises blanked, not executed

Only what changed is built again, unless --all. ``--check`` executes nothing and says what is not
as its source gives it. DEVELOPING.md tells how a source is written.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jupytext
import nbformat

from book.extract import Reference, SourceError, check_blank, reference
from shardbook.chapters import exercises_in

LIMITS = {43: (1_000_000, 180), 44: (1_000_000, 180)}  # bytes, seconds
LIMIT = (600_000, 60)
CPU = 1.5  # CPU seconds, ranks and all, for a second of the limit: it holds on a busy machine too
BUILD = {"exercise", "blank", "predict"}  # cell metadata that the build consumes
KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}


def chapters(only: list[str]) -> list[Path]:
    """The chapters' folders, all or those whose number or name is asked for."""
    found = sorted(p.parent for p in (ROOT / "book").glob("[0-9][0-9]_*/lesson.py"))
    if not only:
        return found
    chosen = [c for c in found if c.name in only or c.name[:2] in only]
    missing = [o for o in only if not any(o in (c.name, c.name[:2]) for c in chosen)]
    if missing:
        names = ", ".join(c.name for c in found)
        raise SourceError(f"no chapter {', '.join(missing)} in book/ (there are: {names})")
    return chosen


# From source to cells


def notebooks(chapter: Path) -> dict[str, nbformat.NotebookNode]:
    """``{"notebooks" | "labs" | "solutions": notebook without outputs}`` of a chapter."""
    made = {"notebooks": _assemble(_read(chapter / "lesson.py"), chapter, "notebooks")}
    if (chapter / "lab.py").exists():
        cells = _read(chapter / "lab.py")
        for kind in ("labs", "solutions"):
            made[kind] = _assemble([_fill(cell, kind == "labs") for cell in cells], chapter, kind)
    return made


def _read(path: Path) -> list[dict]:
    """The cells of a py:percent file; an exercise's cell gets its references."""
    try:
        book = jupytext.reads(path.read_text(), fmt="py:percent")
    except Exception as error:
        raise SourceError(f"{path.relative_to(ROOT)}: {error}") from error
    cells, number = [], 0
    for i, cell in enumerate(book.cells):
        where = f"{path.relative_to(ROOT)}, cell {i + 1}"
        metadata = {k: v for k, v in cell.metadata.items() if not k.startswith("lines_to_")}
        unknown = set(metadata) - BUILD - {"tags"}
        if unknown:
            raise SourceError(f"{where}: cell metadata {', '.join(sorted(unknown))} is not known")
        if cell.cell_type == "markdown":
            heading = re.search(r"(?im)^#+ .*\bexercise (\d+)", cell.source)
            number = int(heading[1]) if heading else number
        entry = {"type": cell.cell_type, "source": cell.source, "metadata": metadata}
        if "exercise" in metadata:
            if not any(re.search(r"(?im)^#+ .*\bexercise \d+", c["source"]) for c in cells):
                number += 1  # no "Exercise 2" headings to go by: count
            blank = metadata.get("blank", "").split()
            names = metadata["exercise"].split()
            refs = [reference(name, blank, number) for name in names]
            check_blank(refs, blank, where)
            entry["references"] = refs
        cells.append(entry)
    return cells


def _fill(cell: dict, lab: bool) -> dict:
    cell = dict(cell)
    if "references" in cell:
        texts = [r.blanked if lab else r.source for r in cell["references"]]
        cell["source"] = "\n\n\n".join(texts)
    for name in cell["metadata"].get("predict", "").split() if lab else []:
        cell["source"] = _unpredicted(cell["source"], name)
    return cell


def _unpredicted(source: str, name: str) -> str:
    """The cell with None for what is assigned to `name`, over however many lines it goes."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == [
            name
        ]:
            lines[node.lineno - 1 : node.end_lineno] = [f"{name} = None  # your prediction"]
            return "\n".join(lines)
    raise SourceError(f'predict="{name}": the cell has no line "{name} = …"')


def _assemble(cells: list[dict], chapter: Path, kind: str) -> nbformat.NotebookNode:
    book = nbformat.v4.new_notebook(metadata=json.loads(json.dumps(KERNEL)))
    cells = [*cells[:1], _links(chapter, kind), *cells[1:]]
    seen: dict[str, int] = {}
    for cell in cells:
        if cell is None:
            continue
        key = repr((cell["type"], cell["source"], cell["metadata"].get("exercise")))
        name = hashlib.sha256(key.encode()).hexdigest()[:10]
        seen[name] = seen.get(name, 0) + 1
        make = getattr(nbformat.v4, f"new_{cell['type']}_cell")
        metadata = {k: v for k, v in cell["metadata"].items() if k not in BUILD}
        made = make(source=cell["source"], metadata=metadata)
        made["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"
        book.cells.append(made)
    text = json.dumps([[c.cell_type, c.source, c.metadata] for c in book.cells])
    book.metadata["shardbook"] = {"source": hashlib.sha256(text.encode()).hexdigest()[:16]}
    return book


def _links(chapter: Path, kind: str) -> dict | None:
    if not (chapter / "lab.py").exists():
        return None
    names = {"notebooks": "the lesson", "labs": "the lab", "solutions": "the solution"}
    links = [f"[{text}](../{k}/{chapter.name}.ipynb)" for k, text in names.items() if k != kind]
    links.append("[all chapters](../notebooks/00_start_here.ipynb)")
    text = f"This is {names[kind]}. Beside it: {' · '.join(links)}"
    return {"type": "markdown", "source": text, "metadata": {}}


# Execution


class Failed(Exception):
    """A notebook raised, took too long or showed a check that does not hold."""


def execute(book: nbformat.NotebookNode, seconds: float, path: str) -> float:
    """Run all cells in a kernel of this Python, in an empty folder; the seconds it took."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    os.environ.update(dict.fromkeys(threads, "1"))
    os.environ.update(JUPYTER_PREFER_ENV_PATH="1", PYTHONHASHSEED="0", SHARDBOOK_PROGRESS="")
    os.environ["SHARDBOOK_LIVE"] = "0"  # the output of ranks in one piece
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            book,
            timeout=int(3 * seconds),
            kernel_name="python3",
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError) as error:
            ran = [
                i for i, c in enumerate(book.cells) if c.get("execution_count") or c.get("outputs")
            ]
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
            raise Failed(f"{path}: cell {max(ran, default=0) + 1} failed\n{text}") from None
    for i, cell in enumerate(book.cells):
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                print(f"  {path}: cell {i + 1} wrote to stderr: {output['text'].strip()[:200]}")
    if path.startswith("solutions/"):
        _all_hold(book, path)
    book.metadata.update(json.loads(json.dumps(KERNEL)))  # no version of the Python that ran it
    return time.monotonic() - start


def _all_hold(book: nbformat.NotebookNode, path: str) -> None:
    for i, cell in enumerate(book.cells):
        if not cell.source.lstrip().startswith("check."):
            continue
        text = "".join(o.get("text", "") for o in cell.outputs)
        if "✗" in text or "✎" in text or "✓" not in text:
            raise Failed(f"{path}: cell {i + 1}: the solution does not pass its check\n{text}")


def build(chapter: Path, everything: bool) -> list[str]:
    """Write the chapter's notebooks that changed; returns what failed."""
    failed = []
    for kind, book in notebooks(chapter).items():
        target = ROOT / kind / f"{chapter.name}.ipynb"
        path = f"{kind}/{target.name}"
        stored = _load(target)
        if stored is not None and not everything and not _differences(stored, book, kind):
            continue
        size, seconds = LIMITS.get(int(chapter.name[:2]), LIMIT)
        took = ""
        if kind != "labs":
            try:
                ran = execute(book, seconds, path)
            except Failed as error:
                failed.append(str(error))
                continue
            took = f"  {ran:.0f} s" + (f" (limit {seconds} s)" if ran > seconds else "")
        text = nbformat.writes(book)
        nbformat.validate(book)
        if len(text.encode()) > size:
            failed.append(f"{path}: {len(text.encode()):,} bytes, the limit is {size:,}")
            continue
        target.parent.mkdir(exist_ok=True)
        half = target.with_suffix(".tmp")
        half.write_text(text + "\n")
        os.replace(half, target)
        print(f"wrote {path}  {len(text.encode()) // 1000} KB{took}", flush=True)
    return failed


# --check


def _load(path: Path) -> nbformat.NotebookNode | None:
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.reader.NotJSONError):
        return None


def _differences(stored: nbformat.NotebookNode, book: nbformat.NotebookNode, kind: str) -> str:
    """What makes a stored notebook another one than its source gives; "" if nothing does."""

    def bare(nb):
        return [(c.cell_type, c.source, dict(c.metadata), c.get("id")) for c in nb.cells]

    mark = stored.metadata.get("shardbook", {}).get("source")
    if bare(stored) != bare(book) or mark != book.metadata.shardbook.source:
        return "is not what its source gives"
    code = [c for c in stored.cells if c.cell_type == "code"]
    if kind == "labs":
        return "holds outputs" if any(c.outputs or c.execution_count for c in code) else ""
    if [c.execution_count for c in code] != list(range(1, len(code) + 1)):
        return "was not executed from top to bottom"
    if any(o.output_type == "error" for c in code for o in c.outputs):
        return "stores an error"
    return ""


def check(chapter: Path) -> list[str]:
    """What is wrong with a chapter's stored notebooks, without executing anything."""
    problems = []
    size, _ = LIMITS.get(int(chapter.name[:2]), LIMIT)
    made = notebooks(chapter)
    for kind, book in made.items():
        target = ROOT / kind / f"{chapter.name}.ipynb"
        path = f"{kind}/{target.name}"
        stored = _load(target)
        if stored is None:
            problems.append(f"{path} does not exist or is no notebook")
            continue
        wrong = _differences(stored, book, kind)
        if wrong:
            problems.append(f"{path} {wrong}: run python book/build.py {chapter.name[:2]}")
        if target.stat().st_size > size:
            problems.append(f"{path} has {target.stat().st_size:,} bytes, the limit is {size:,}")
    if "labs" in made:
        cells = _read(chapter / "lab.py")
        exercises = [c["references"] for c in cells if "references" in c]
        references = [r for cell in exercises for r in cell]
        problems += leaks(made["labs"], references, f"labs/{chapter.name}.ipynb")
        problems += _missing(chapter, exercises)
    return problems


def leaks(lab: nbformat.NotebookNode, references: list[Reference], path: str) -> list[str]:
    """Solution text in a lab: more than half of a blanked body in a cell, or its import."""
    problems = []
    modules = {r.dotted.rsplit(".", 1)[0]: set() for r in references}
    for r in references:
        modules[r.dotted.rsplit(".", 1)[0]].add(r.name)
    for i, cell in enumerate(lab.cells):
        lines = [line.split("  #")[0].strip() for line in cell.source.splitlines()]
        for r in references:
            for body in r.removed:
                shown = sum(line in lines for line in body)
                if body and shown > len(body) / 2:
                    problems.append(f"{path}: cell {i + 1} shows the solution of {r.name}")
            if r.dotted in cell.source:
                problems.append(f"{path}: cell {i + 1} names {r.dotted}")
        for module, names in modules.items():
            for found in re.findall(
                rf"from {re.escape(module)} import ([^\n(]+|\([^)]*\))", cell.source
            ):
                given = {n.split(" as ")[0].strip() for n in found.strip("()").split(",")} & names
                if given or found.strip() == "*":
                    problems.append(
                        f"{path}: cell {i + 1} imports {', '.join(sorted(given)) or '*'}"
                    )
    return problems


def _missing(chapter: Path, exercises: list[list[Reference]]) -> list[str]:
    """Checks without a place in the lab, and exercise cells that no check looks at."""
    path = ROOT / "shardbook" / "checks" / chapter.name[3:]  # a folder, or one module
    if not path.is_dir():
        path = path.with_suffix(".py")
    if not path.exists():
        return [f"{path.relative_to(ROOT)} does not exist"]
    checked = set(exercises_in(path.parent, path.stem))
    cells = [[r.name for r in references] for references in exercises]
    lab = f"book/{chapter.name}/lab.py"
    there = {name for names in cells for name in names}
    return [f"{lab} has no exercise {n}" for n in sorted(checked - there)] + [
        f"{path.relative_to(ROOT)} has no check of {' or '.join(names)}"
        for names in cells
        if not checked & set(names)  # helpers of a checked one may share its cell
    ]


def orphans() -> list[str]:
    """Notebooks that no source gives."""
    made = {(k, c.name) for c in chapters([]) for k in notebooks(c)}
    found = [(k, p) for k in ("notebooks", "labs", "solutions") for p in (ROOT / k).glob("*.ipynb")]
    return [f"{k}/{p.name} has no source in book/" for k, p in found if (k, p.stem) not in made]


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 if everything is built or as its source gives it."""
    parser = argparse.ArgumentParser(prog="book/build.py", description=__doc__.split("\n")[0])
    parser.add_argument("chapter", nargs="*", help="numbers or names; all if none")
    parser.add_argument("--all", action="store_true", help="build also what did not change")
    parser.add_argument("--check", action="store_true", help="execute and write nothing")
    args = parser.parse_args(argv)
    problems = []
    try:
        for chapter in chapters(args.chapter):
            try:
                problems += check(chapter) if args.check else build(chapter, args.all)
            except SourceError as error:
                problems.append(str(error))
        if args.check and not args.chapter:
            problems += orphans()
    except SourceError as error:
        problems.append(str(error))
    for problem in problems:
        print(f"✗ {problem}", file=sys.stderr)
    if not problems:
        print("all notebooks are what their sources give")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
