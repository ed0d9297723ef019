"""Chapter 44: the port's rotary positions, the block and the model over ranks, and preference."""

from ..report import gather

gather(globals())
