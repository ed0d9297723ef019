"""Every colour of the book's pictures and of the traces' kinds, each stated once.

`COLOURS` and the greys below are for plots and drawings (pictures/, which may know this room, not
the other way round); `KINDS` are the slices of a trace, in the order in which kinds are met
(kinds.py hands them out, picture.py and viewer/ draw them). The page around the slices, light and
dark, is the viewer's own matter.
"""

# Okabe and Ito's palette: told apart with every common colour blindness. So is the dark grey; a
# lighter one is the pink of the palette to a deuteranope (a test simulates that).
OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
GREY = "#999999"  # edges
DARK_GREY = "#595959"

COLOURS = [*OKABE_ITO, DARK_GREY]
"""Of ranks, series and parts, in their order."""

KINDS = [*OKABE_ITO, "#F7E7AF", "#FFDFEF", "#87E7FF", "#EFA7A7", "#A7BF77", "#97CFCF", "#EFE7CF"]
"""Of the kinds of a trace: the palette for what works, pale ones for what mostly holds or waits."""
OTHER = DARK_GREY
"""Kinds past the palette, and slices that were joined because they are short."""

INK = "#222222"  # arrows
LINE = "#444444"  # frames
NOTE = "#666666"  # small text beside a drawing
EMPTY = "#dddddd"  # what nobody holds
