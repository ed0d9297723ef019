"""Chapter 25: mixture of experts, judged token by token against a dense loop."""

import sys

from ..report import checks_of, gather

gather(globals())
globals().update(checks_of(sys.modules[__name__]))  # by the exercises' names, too: classes
