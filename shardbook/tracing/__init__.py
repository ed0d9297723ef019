"""Record, merge and show traces: ``with sb.trace(model) as t: …``; ``t`` displays inline.

record.py notes what a rank does, timeline.py turns the notes into slices, merge.py puts all ranks
on one timeline, events.py writes the Chrome format, tables.py prints, view.py draws. diff.py
compares two traces: steps.py reads them, align.py puts them side by side, before.py knows what
happened before what, words.py says it.
"""

from .expected import expected_calls
from .merge import Trace, merge
from .record import label, mark, pace, trace
from .shown import show
from .validate import validate

__all__ = ["Trace", "expected_calls", "label", "mark", "merge", "pace", "show", "trace", "validate"]

# `sb.trace` is the function; what belongs to it is found on it, as in ``sb.trace.merge(parts)``.
trace.merge, trace.label, trace.validate = merge, label, validate
