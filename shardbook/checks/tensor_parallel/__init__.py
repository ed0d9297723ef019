"""Chapter 22: what tensor- and sequence-parallel layers must do."""

from ..report import gather

gather(globals())
