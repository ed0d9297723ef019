"""Chapter 24: context parallel, judged against attention over the whole sequence."""

from ..report import gather

gather(globals())
