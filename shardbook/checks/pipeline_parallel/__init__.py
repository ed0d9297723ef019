"""Chapter 23: pipeline parallel. A clock of our own plays the schedules that are judged."""

from ..report import gather

gather(globals())
