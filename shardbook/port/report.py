"""`sb.port.report(path)` in a notebook: the findings as a table, as plain text elsewhere."""

import dataclasses
import html
from pathlib import Path

from . import cli
from .rules import RULES, SEVERITIES
from .scan import Finding, scan

COLOURS = {"breaks": "#D55E00", "wrong": "#CC79A7", "slow": "#E69F00", "style": "#777777"}


class Report:
    """What was found: the causes as `findings`, the places that follow from them, a table."""

    def __init__(self, findings: list[Finding]):
        self.findings, self.all = cli.roots(findings), findings

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return cli.text(self.all)

    __repr__ = __str__

    def counts(self) -> dict[str, dict[str, int]]:
        """For each file, how many findings of each severity."""
        files = cli.by_file(self.findings)
        return {f: {s: sum(x.severity == s for x in mine) for s in SEVERITIES}
                for f, mine in files.items()}  # fmt: skip

    def _repr_html_(self) -> str:
        if not self.all:
            return f"<p>{html.escape(str(self))}</p>"
        parts = []
        for file, mine in cli.by_file(self.all).items():
            name = html.escape(file)
            parts.append(f"<details open><summary><b>{name}</b>: {cli.counts(mine)}</summary>")
            parts.append("<table><tr><th>line</th><th>severity</th><th>code</th><th>why</th>"
                         "<th>instead</th></tr>")  # fmt: skip
            parts += [_row(f) for f in mine]
            parts.append("</table></details>")
        parts.append(f"<p>{cli.counts(self.all)} in all</p>")
        return '<div style="background:white;color:black">' + "".join(parts) + "</div>"


def _row(f: Finding) -> str:
    """One finding; everything from the file is text here, never markup."""
    rule = RULES[f.rule]
    left = ' style="text-align:left"'
    cells = [html.escape(x) for x in (f.code[:120], rule.why, f.instead)]
    code, why, instead = cells
    why += f"<br>follows from {html.escape(f.cause)}" if f.cause else ""
    return (
        f'<tr><td>{f.line}</td><td style="color:{COLOURS[f.severity]}">{f.severity}</td>'
        f"<td{left}><code>{code}</code></td><td{left}>{why}</td><td{left}>{instead}</td></tr>"
    )


def report(*paths: str | Path) -> Report:
    """Read Python files and folders without running them; what an NPU will not do in them.

    Files of an absolute path are named from its last part on: a notebook is shown to others.
    FileNotFoundError for a path that is not there. ValueError for none.
    """
    if not paths:
        raise ValueError("report() got no path: give Python files or folders")
    return Report([_short(f, Path(path)) for path in paths for f in scan([path])])


def _short(finding: Finding, given: Path) -> Finding:
    """The finding with `project/model.py` where the folder was given with its whole path."""
    if not given.is_absolute():
        return finding
    below = Path(finding.file).relative_to(given)
    return dataclasses.replace(finding, file=str(Path(given.name) / below))
