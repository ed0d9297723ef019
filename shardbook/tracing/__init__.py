"""Record, merge and show traces: ``with sb.trace(model) as t: …``; ``t`` displays inline.

record.py notes what a rank does, timeline.py turns the notes into slices, merge.py puts all ranks
on one timeline, events.py writes the Chrome format, tables.py prints, view.py draws.
"""

from .foreign import show
from .merge import Trace, merge
from .record import label, mark, pace, trace
from .validate import validate

__all__ = ["Trace", "label", "mark", "merge", "pace", "show", "trace", "validate"]
