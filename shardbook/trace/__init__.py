"""Record, merge and show traces: ``with sb.trace(model) as t: …``; ``t`` displays inline.

record.py notes what a rank does, timeline.py turns the notes into slices, merge.py puts all ranks
on one timeline, events.py writes the Chrome format, tables.py prints, view.py draws.
"""

import importlib
import sys
import types

from .foreign import show
from .merge import Trace, merge
from .record import label, mark, pace, trace
from .validate import validate

__all__ = ["Trace", "label", "mark", "merge", "pace", "show", "trace", "validate"]


class _CallableModule(types.ModuleType):
    """`sb.trace` is this package and also what people call: both readings work."""

    def __call__(self, *args, **kwargs):
        return trace(*args, **kwargs)

    def __reduce__(self):
        return importlib.import_module, (self.__name__,)


_CallableModule.__call__.__doc__ = trace.__doc__
sys.modules[__name__].__class__ = _CallableModule
