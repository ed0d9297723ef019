"""Figures of papers, redrawn in our own words."""

import difflib

FIGURES: dict[str, str] = {}


def find(figure: str) -> str:
    """The text of a figure: its own, or the library's of that name."""
    if "\n" in figure or ":" in figure:
        return figure
    name = figure.strip().lower()
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"there is no figure {figure!r}{meant}: give the text of one, a line a box, or one of "
            f"{', '.join(FIGURES)}"
        )
    return FIGURES[name]
