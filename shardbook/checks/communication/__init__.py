"""Chapter 13: collectives from messages alone. Values, and who sent how much to whom."""

from ..report import gather

gather(globals())
