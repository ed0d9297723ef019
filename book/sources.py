"""What the book cites, and where: the last column of sources.md.

`python book/sources.py` writes that column anew and says which citations the table lacks and which
rows nothing cites any more; what a source says is written by a person who has looked it up.
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE / "sources.md"
HEADER = "| citation | what it says | looked up | used in |"
ISSUE = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")
SHORT = re.compile(r"(?<![\w./-])([A-Za-z][\w.-]*/[\w.-]+#\d+)")
PAPER = re.compile(r"(?<![\d.])((?:0[7-9]|1\d|2\d)(?:0[1-9]|1[0-2])\.\d{5})(?![\d.]*\d)")
ADDRESS = re.compile(r"https?://[^\s)>\]\"'`|]+")


def citations(text: str) -> set[str]:
    """Papers, issues and addresses in a text, each written in one way."""
    found = {f"{repository}#{number}" for repository, number in ISSUE.findall(text)}
    text = ISSUE.sub(" ", text)
    found |= {f"arXiv {number}" for number in PAPER.findall(text)}
    addresses = {address.rstrip(".,;:") for address in ADDRESS.findall(text)}
    found |= {a for a in addresses if not re.search(r"arxiv\.org|localhost|[{}]", a)}
    text = re.sub(
        r"\[[^\]]*\]\([^)]*\)", " ", text
    )  # a link's text may be shorter than its address
    return found | set(SHORT.findall(text))


def cited() -> dict[str, list[str]]:
    """Citation -> chapters, and files of shardbook that name a paper, in order."""
    where: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("[0-9][0-9]_*/l*.py")):
        for name in citations(path.read_text()):
            where.setdefault(name, []).append(path.parent.name[:2])
    package = HERE.parent / "shardbook"
    for path in sorted(package.rglob("*.py")):
        for number in set(PAPER.findall(path.read_text())):
            file = path.relative_to(package.parent).as_posix()
            where.setdefault(f"arXiv {number}", []).append(file)
    return {name: list(dict.fromkeys(places)) for name, places in where.items()}


def rows(text: str) -> dict[str, list[str]]:
    """Citation -> [citation, what it says, looked up, used in] of a table."""
    _, _, body = text.partition(HEADER)
    lines = [line for line in body.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in cells}


def refreshed(text: str, where: dict[str, list[str]]) -> str:
    """The table's text with its last column as the book is now."""
    lines = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in where:
            line = f"| {' | '.join(cells[:3])} | {', '.join(where[cells[0]])} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def missing_and_unused(text: str, where: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """What chapters cite without a row, and rows of what nothing cites.

    A paper that only the package names may have a row, and need not.
    """
    listed = set(rows(text))
    chapters = {name for name, places in where.items() if places[0].isdigit()}
    return sorted(chapters - listed), sorted(listed - set(where))


def main() -> int:
    """Refresh the table's last column; 1 where a row is missing or too many."""
    text, where = TABLE.read_text(), cited()
    TABLE.write_text(refreshed(text, where))
    missing, unused = missing_and_unused(text, where)
    for name in missing:
        print(f"no row: {name} ({', '.join(where[name])}); look it up and add one")
    for name in unused:
        print(f"cited nowhere: {name}; take its row out")
    return 1 if missing or unused else 0


if __name__ == "__main__":
    sys.exit(main())
