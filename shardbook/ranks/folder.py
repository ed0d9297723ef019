"""The folder of one run: what lies in it, and under which name."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Folder:
    """Paths of what the notebook's process and the ranks tell each other through files."""

    path: str

    @property
    def name(self) -> str:
        """The folder's own name, which no other run on this host has."""
        return os.path.basename(self.path)

    @property
    def job(self) -> str:
        """What the ranks are to do, written before they start."""
        return os.path.join(self.path, "job")

    def calls(self, rank: int) -> str:
        """The log of a rank's calls."""
        return os.path.join(self.path, f"calls-{rank}")

    def output(self, rank: int) -> str:
        """What a rank prints."""
        return os.path.join(self.path, f"output-{rank}")

    def stack(self, rank: int) -> str:
        """Where a rank is, once it is asked with a signal."""
        return os.path.join(self.path, f"stack-{rank}")

    def outcome(self, rank: int) -> str:
        """What a rank returned or raised, there when it is done."""
        return os.path.join(self.path, f"outcome-{rank}")
