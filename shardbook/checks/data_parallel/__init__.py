"""Chapter 21: data parallel and ZeRO."""

from ..report import gather

gather(globals())
