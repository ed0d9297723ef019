"""sb.show: a Chrome trace that anyone wrote, shown like our own."""

import os

from . import foreign
from .merge import Trace


def show(trace: str | os.PathLike | dict | list | Trace, title: str = "") -> Trace:
    """Any Chrome trace as a `Trace` that displays inline: a path (also gzipped), a dict or list.

    Slices that overlap on one thread, negative times, begin/end pairs and events of older formats
    are put in an order that every viewer reads. What has no place there (objects, memory dumps, an
    arrow whose end lies in no slice) is left out, and the title says so.
    """
    if isinstance(trace, Trace):
        return trace
    if isinstance(trace, (str, os.PathLike)):
        title = title or os.path.basename(trace)
    chrome, left_out = foreign.load(trace)
    if left_out:
        title = f"{title or 'trace'} (left out: {left_out})"
    result = Trace(title=title)
    result.foreign = chrome
    return result
