"""A figure as text: a line a box, what lies inside a box is indented under it."""

import dataclasses
import difflib
import re

KINDS = {
    "attention": "self-attention msa mha",
    "cross-attention": "cross",
    "mlp": "ffn feed-forward feedforward",
    "norm": "layernorm rmsnorm groupnorm",
    "embedding": "embed",
    "position": "positional",
    "patch": "patchify",
    "time": "timestep",
    "rotary": "rope",
    "modulation": "adaln",
    "linear": "projection dense",
    "head": "logits",
    "conv": "convolution",
    "resnet": "residual",
    "down": "downsample",
    "up": "upsample",
    "moe": "mixture",
    "router": "gating",
    "experts": "expert",
    "ssm": "mamba",
    "block": "layer",
    "stage": "level",
    "stack": "encoder decoder tower model",
}
"""What a box may be, and other words for it."""

OTHER = {word: kind for kind, words in KINDS.items() for word in words.split()}
HINTS = {  # of a label without a kind: the first that is found
    "cross-attention": r"cross.?att|encoder.?decoder att",
    "modulation": r"modulation|adaln|scale|shift",
    "rotary": r"rotary|rope",
    "router": r"router|gating",
    "experts": r"experts?\b",
    "moe": r"mixture|\bmoe\b",
    "ssm": r"mamba|\bssm\b|state.?space",
    "time": r"time",
    "patch": r"patch",
    "position": r"position",
    "norm": r"norm",
    "attention": r"att(ention|n)\b|\bmsa\b|\bmha\b",
    "mlp": r"mlp|feed.?forward|\bffn?\b|swiglu|geglu",
    "embedding": r"embed",
    "head": r"head\b(?<!multi-head)|logits|softmax|classifier|unpatch",
    "resnet": r"resnet|residual",
    "down": r"down.?sampl|patch merging",
    "up": r"up.?sampl",
    "conv": r"conv",
    "block": r"block|layer\b",
    "stage": r"stage|level|middle",
    "linear": r"linear|projection|dense",
    "stack": r"encoder|decoder|tower|language model",
}
TERM = re.compile(r"(\d+)?\*?([A-Za-z_]\w*)?$")
Term = tuple[int, str]  # (4, "d") is 4d, (768, "") is 768, (1, "*") is anything


@dataclasses.dataclass(eq=False)
class Box:
    """One box of a figure: what it says, what it holds."""

    label: str
    kind: str
    dims: tuple[Term, ...] = ()
    repeats: int | str = 1  # a number, or a letter: as often as the model has it
    inside: list["Box"] = dataclasses.field(default_factory=list)

    def every(self) -> list["Box"]:
        """This box and those inside it, in the order of the lines."""
        return [self, *(b for child in self.inside for b in child.every())]


def read(text: str) -> tuple[str, list[Box]]:
    """(title, the outermost boxes) of a figure; a ValueError names the line that is wrong."""
    title, top, seen = "", [], set()
    open_: list[tuple[int, Box]] = []  # boxes a line may lie inside, with their indentation
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if words.startswith("#"):
            title = title or words.lstrip("# ").strip()
        if not words or words.startswith("#"):
            continue
        where = f"line {number} of the figure ({words!r})"
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ValueError(f"{where} is indented by a tab: indent with spaces")
        indent = len(line) - len(line.lstrip())
        box = _box(words, where)
        name, count = box.label, 1
        while box.label in seen:  # papers repeat their words
            count += 1
            box.label = f"{name} ({count})"
        seen.add(box.label)
        deepest = open_[-1][0] if open_ else indent
        while open_ and open_[-1][0] >= indent:
            deepest = open_.pop()[0]
        if indent < deepest:
            raise ValueError(f"{where} is indented by {indent} spaces, which no line above it is")
        (open_[-1][1].inside if open_ else top).append(box)
        open_.append((indent, box))
    if not top:
        raise ValueError("the figure has no box: write one a line, as 'feed forward: mlp, d -> 4d'")
    return title, top


def _box(words: str, where: str) -> Box:
    label, colon, rest = (part.strip() for part in words.partition(":"))
    if not label:
        raise ValueError(f"{where} has no label before its colon")
    if not colon and (found := re.fullmatch(r"(.*\S)\s+([x×]\s*(?:\d+|[A-Z]))", label)):
        label, rest = found[1], found[2]
    first, _, shape = (part.strip() for part in rest.partition(","))
    kind, repeats = first, 1
    if found := re.fullmatch(r"(.*?)(?:^|\s)[x×]\s*(\w+)", first):
        kind, repeats = found[1].strip(), int(found[2]) if found[2].isdecimal() else found[2]
        if repeats == 0:
            raise ValueError(f"{where} is drawn zero times: after x comes 1 or more, or a letter")
    kind = _kind(kind.lower(), where) if kind else guess(label)
    if not kind:
        asked = "after the colon" if colon else "after a colon"
        raise ValueError(f"{where} does not say what the box is: {asked} write {listed()}")
    return Box(label, kind, tuple(_term(t, where) for t in shape.split("->") if shape), repeats)


def _kind(word: str, where: str) -> str:
    kind = OTHER.get(word, word)
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, [*KINDS, *OTHER], 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{where} has no kind {word!r}{meant}: a box is {listed()}")
    return kind


def _term(term: str, where: str) -> Term:
    found = TERM.fullmatch(term.strip())
    if term.strip() == "*":
        return (1, "*")
    if not found or not term.strip() or found[1] == "0":
        raise ValueError(
            f"{where} has the size {term.strip()!r}: sizes are numbers, letters or multiples of "
            "letters from input to output, as 'd -> 4d -> d' or '3 -> 768'"
        )
    return (int(found[1] or 1), found[2] or "")


def guess(label: str) -> str:
    """What a label says it is, "" where it doesn't."""
    found = (kind for kind, words in HINTS.items() if re.search(words, label.lower()))
    return next(found, "")


def listed() -> str:
    """All kinds, for a message."""
    return f"one of {', '.join(KINDS)}"
