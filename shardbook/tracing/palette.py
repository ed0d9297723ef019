"""Every colour of the book's pictures and of the traces' kinds, each stated once.

`COLOURS` and the greys below are for plots and drawings (pictures/, which may know this room, not
the other way round); `KINDS` are the slices of a trace, in the order in which kinds are met
(layout.py hands them to picture.py and viewer.js). The page around the slices, light and dark, is
the viewer's own matter.
"""

# Okabe and Ito's palette: told apart with every common colour blindness.
OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
GREY = "#999999"

COLOURS = [*OKABE_ITO, GREY]
"""Of ranks, series and parts, in their order."""

KINDS = [*OKABE_ITO, "#B9CDD9", "#E3D3B4", "#B5D3C8", "#DFCBD6", "#C9DFEB", "#E0C3B0", "#E6E2BC"]
"""Of the kinds of a trace: the palette, then the same hues pale."""
MERGED = GREY
"""Slices too short to draw one by one, and kinds past the palette."""

INK = "#222222"  # arrows
LINE = "#444444"  # frames
NOTE = "#666666"  # small text beside a drawing
EMPTY = "#dddddd"  # what nobody holds
