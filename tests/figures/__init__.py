"""Figures of papers, labelled by hand: what `sb.match` is measured with.

Each is a figure in the words of its paper, and behind `=` the module that the box is, found by
reading the model's source before the matcher was written; `|` parts names that are equally right
(a wrapper and the one layer in it, a weight that two modules share). A box that is drawn once for
N repeated blocks is the first of them; a box that is several layers in a row (BART's feed forward
is no module) goes by the first of them.
"""

import importlib


def make(name: str) -> tuple:
    """The tiny model of that name, and the keyword arguments of its forward."""
    for file in ("models", "diffusion"):
        found = importlib.import_module(f".{file}", __name__)
        if hasattr(found, name):
            return getattr(found, name)()
    raise LookupError(name)


def parts(labelled: str) -> tuple[str, list[set[str]]]:
    """The figure alone, and the right names of each of its boxes, in order."""
    lines = [line for line in labelled.strip("\n").splitlines() if line.strip()]
    figure = [line.partition(" = ")[0].rstrip() for line in lines]
    right = [{n.strip() for n in line.partition(" = ")[2].split("|")} for line in lines]
    return "\n".join(figure), right
