"""The tables of a trace: they print as text, show as a table in a notebook, and keep their rows."""

import html
import math
import re
from collections.abc import Callable

from .timeline import RankTrace, parameter, text


class Table:
    """Rows (a list of dicts, `.rows`) that print well, as text and in a notebook.

    folded: (column, name, function of a row to a list of texts) for what a cell of that column
    shows in a notebook once it is clicked; as text it is a last column of its own.
    """

    def __init__(
        self,
        rows: list[dict],
        columns: dict[str, Callable],
        note: str = "",
        folded: tuple[str, str, Callable[[dict], list[str]]] | None = None,
    ):
        self.rows, self.columns, self.note, self.folded = rows, columns, note, folded

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.rows[i]

    def _cells(self) -> list[list[str]]:
        return [[str(show(row)) for show in self.columns.values()] for row in self.rows]

    def _right(self, cells: list[list[str]]) -> list[bool]:
        """Which columns hold numbers only: these are set to the right."""
        digits = str.maketrans("", "", ",.")
        return [
            any(column) and all(not c or c.translate(digits).isdigit() for c in column)
            for column in zip(*cells, strict=True)
        ] or [False] * len(self.columns)

    def __str__(self) -> str:
        cells, names = self._cells(), list(self.columns)
        right = self._right(cells)
        if self.folded is not None:
            _, name, texts = self.folded
            cells = [[*c, ", ".join(texts(r))] for c, r in zip(cells, self.rows, strict=True)]
            names, right = [*names, name], [*right, False]
        cells = [names, *cells]
        widths = [max(len(row[i]) for row in cells) for i in range(len(names))]

        def line(row: list[str]) -> str:
            columns = zip(row, widths, right, strict=True)
            return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in columns).rstrip()

        lines = [line(row) for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines + ([self.note] if self.note else []))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = self._cells()
        right, first = self._right(cells), next(iter(self.columns))
        styles = {}
        for name, number in zip(self.columns, right, strict=True):
            wraps = not number and name != first
            styles[name] = (
                f"text-align:{'right' if number else 'left'};vertical-align:top;padding:2px 6px;"
                f"white-space:{'normal' if wraps else 'pre'}"
            )

        def row(tag: str, shown: dict[str, str]) -> str:
            inner = (f'<{tag} style="{styles[n]}">{cell}</{tag}>' for n, cell in shown.items())
            return f"<tr>{''.join(inner)}</tr>"

        head, body = row("th", {name: html.escape(name) for name in self.columns}), ""
        for given, texts in zip(self.rows, cells, strict=True):
            shown = dict(zip(self.columns, map(_breakable, texts), strict=True))
            shown[first] = html.escape(texts[0])
            if self.folded is not None and (more := self.folded[2](given)):
                shown[self.folded[0]] = _fold(shown[self.folded[0]], more)
            body += row("td", shown)
        note = self.note
        if self.folded is not None:
            note = f"Click on {self.folded[0]} to see a module's own. {note}"
        return (
            '<div style="overflow:auto;max-height:480px"><table>'
            f"<thead>{head}</thead><tbody>{body}</tbody></table></div>"
            + (f"<div>{html.escape(note)}</div>" if note else "")
        )


def _fold(shown: str, more: list[str]) -> str:
    lines = "<br>".join(html.escape(line) for line in more)
    return (
        f'<details><summary style="cursor:pointer">{shown}</summary>'
        f'<div style="text-align:left;white-space:nowrap">{lines}</div></details>'
    )


def _breakable(text: str) -> str:
    """Html that breaks between tensors and between the words of a name, not inside a shape."""
    whole = re.sub(r"\[[^\]]*\]", lambda shape: shape[0].replace(" ", "\u00a0"), text)
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<==)|(?<=\w_)(?=\w)", "<wbr>", html.escape(whole))


def module_table(ranks: list[RankTrace]) -> Table:
    """A row a module: see `Trace.table`."""
    rows = [row for rank in ranks for row in _module_rows(rank)]
    counted = any(r.flops is not None for r in ranks)
    columns = {
        "module": lambda r: "  " * r["depth"] + (r["name"].rsplit(".", 1)[-1] or "(model)"),
        "type": lambda r: r["type"],
        "calls": lambda r: r["calls"],
        "inputs": lambda r: r["inputs"],
        "outputs": lambda r: r["outputs"],
        "parameters": lambda r: f"{r['parameters']:,}",
        "first ms": lambda r: "" if r["ms"] is None else f"{r['ms']:.3f}",
        "FLOPs": lambda r: "" if r["flops"] is None else f"{r['flops']:,}",
    }
    if any(r["local_parameters"] != r["parameters"] for r in rows):
        sharded = {"on this rank": lambda r: f"{r['local_parameters']:,}"}
        after = list(columns).index("parameters") + 1
        columns = dict(
            [*list(columns.items())[:after], *sharded.items(), *list(columns.items())[after:]]
        )
    if len(ranks) > 1:
        columns = {"rank": lambda r: r["rank"], **columns}
    note = (
        "FLOPs: every matrix product of the first call, forward."
        if counted
        else "FLOPs of linear and convolution layers in the first call, forward; "
        "sb.trace(model, flops=True) counts every matrix product."
    )
    own = ("parameters", "own parameters", lambda r: [f"{n} {t}" for n, t in r["own"].items()])
    return Table(rows, columns, note, own)


def _module_rows(rank: RankTrace) -> list[dict]:
    visits = rank.visits()
    first: dict[int, int] = {}
    calls = [0] * len(rank.modules)
    for i, visit in enumerate(visits):
        first.setdefault(visit.module, i)
        calls[visit.module] += 1
    own_flops = _flops(rank, visits)
    below = dict(enumerate(own_flops))
    for i in range(len(visits) - 1, -1, -1):  # children come after their parents
        parent = visits[i].parent
        if parent >= 0 and below[i] is not None:
            below[parent] = (below[parent] or 0) + below[i]
    names = [m["name"] for m in rank.modules]
    subtree: list[dict] = [{} for _ in names]  # id -> parameter, so that a tied weight counts once
    places = {name: i for i, name in enumerate(names)}
    for m in rank.modules:
        parts = m["name"].split(".") if m["name"] else []
        for depth in range(len(parts) + 1):
            at = places.get(".".join(parts[:depth]))
            if at is not None:
                subtree[at].update({p["id"]: p for p in m["parameters"].values()})
    rows = []
    for i, m in enumerate(rank.modules):
        record = visits[first[i]].record if i in first else None
        done = record is not None and record[3] is not None
        rows.append(
            {
                "rank": rank.rank,
                "name": m["name"],
                "type": m["type"],
                "depth": m["name"].count(".") + 1 if m["name"] else 0,
                "calls": calls[i],
                "inputs": text(record[6]) if record else "",
                "outputs": text(record[7]) if record else "",
                "own": {n: parameter(p) for n, p in m["parameters"].items()},
                "parameters": sum(math.prod(p["shape"]) for p in subtree[i].values()),
                "local_parameters": sum(math.prod(p["local_shape"]) for p in subtree[i].values()),
                "ms": (record[3] - record[2]) / 1e6 if done else None,
                "flops": below[first[i]] if i in first else None,
            }
        )
    return rows


def _flops(rank: RankTrace, visits: list) -> list[int | None]:
    """Forward FLOPs of each visit without its children's: counted, else by the layer's formula."""
    if rank.flops is None:
        return [_layer_flops(rank.modules[v.module], v.record[7]) for v in visits]
    own: list[int | None] = [None] * len(visits)
    by_start = sorted((v.record[2], i) for i, v in enumerate(visits))
    stack: list[int] = []
    at = 0
    for now, thread, count in rank.flops:
        while at < len(by_start) and by_start[at][0] <= now:
            stack.append(by_start[at][1])
            at += 1
        stack = [i for i in stack if (visits[i].record[3] or rank.end) >= now]
        inside = [i for i in stack if visits[i].record[1] == thread]
        if inside:
            own[inside[-1]] = (own[inside[-1]] or 0) + count
    return own


def _layer_flops(module: dict, output: object) -> int | None:
    """Two a multiply-add: of a linear layer 2 * numel(out) * in_features, likewise convolutions."""
    if not isinstance(output, tuple) or "weight" not in module["parameters"]:
        return None
    shape = output[2] if len(output) > 2 else output[0]
    if not all(isinstance(n, int) for n in shape):  # of a nested tensor
        return None
    if module["kind"] == "linear":
        return 2 * math.prod(shape) * module["parameters"]["weight"]["local_shape"][-1]
    if module["kind"] == "convolution" and "Transpose" not in module["type"]:
        return 2 * math.prod(shape) * math.prod(module["parameters"]["weight"]["local_shape"][1:])
    return None


def comm_table(ranks: list[RankTrace]) -> Table:
    """A row per rank, operation and group: calls, bytes, milliseconds."""
    rows: dict[tuple, dict] = {}
    for rank in ranks:
        for call in rank.calls:
            row = rows.setdefault(
                (rank.rank, call.op, call.group),
                {"rank": rank.rank, "op": call.op, "group": call.group}
                | {"calls": 0, "bytes": 0, "ms": 0.0},
            )
            row["calls"] += 1
            row["bytes"] += call.nbytes
            row["ms"] += ((call.end_ns or rank.end) - call.start_ns) / 1e6
    columns = {
        "rank": lambda r: r["rank"],
        "op": lambda r: r["op"],
        "group": lambda r: ",".join(map(str, r["group"])),
        "calls": lambda r: r["calls"],
        "bytes": lambda r: f"{r['bytes']:,}",
        "ms": lambda r: f"{r['ms']:.3f}",
    }
    return Table(list(rows.values()), columns)
