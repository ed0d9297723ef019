"""What ranks print: captured to a file each, shown by rank with identical lines folded."""

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from ..words import ranks_text

SHOWN_LINES = 200  # of one run, in the notebook; Result.output holds them all
SHOWN_CHARACTERS = 500  # of one line
MOST_BYTES = 64 * 2**20  # of one rank, after which the run is ended
LIVE_AFTER = 3.0  # seconds after which rank 0's lines are shown as they come

# gloo announces every group it connects, on stdout.
_NOISE = re.compile(rb"^\[Gloo\] Rank \d+ is connected to .*\n?", re.MULTILINE)


def read(path: str) -> str:
    """A rank's output so far; the part after the last carriage return of each line."""
    try:
        with open(path, "rb") as f:
            raw = f.read(MOST_BYTES)
    except FileNotFoundError:
        return ""
    text = _NOISE.sub(b"", raw).decode("utf-8", "replace").replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return text


def fold(outputs: Sequence[str] | dict[int, str]) -> str:
    """The lines of all ranks, each under "[rank r]", or "[ranks a-b]" where several printed it.

    Each rank's own order is kept. The same outputs always give the same text.
    """
    by_rank = outputs if isinstance(outputs, dict) else dict(enumerate(outputs))
    left = {r: text.splitlines() for r, text in by_rank.items() if text}
    total = sum(map(len, left.values()))
    left = {r: lines[:SHOWN_LINES][::-1] for r, lines in left.items()}  # next line last
    later = Counter(line for lines in left.values() for line in set(lines[:-1]))
    counts = {r: Counter(lines) for r, lines in left.items()}
    shown, printed = [], 0
    while left and len(shown) < SHOWN_LINES:
        # A line that others still have ahead of them waits for them, unless all do.
        heads = {lines[-1]: None for _, lines in sorted(left.items())}
        line = next((h for h in heads if not later[h]), next(iter(heads)))
        together = [r for r in sorted(left) if left[r][-1] == line]
        for r in together:
            lines = left[r]
            counts[r][lines.pop()] -= 1
            printed += 1
            if not lines:
                del left[r]
            elif counts[r][lines[-1]] == 1:
                later[lines[-1]] -= 1  # it is now at the head, and nowhere behind
        if len(line) > SHOWN_CHARACTERS:
            line = f"{line[:SHOWN_CHARACTERS]} … ({len(line):,} characters)"
        shown.append(f"[{ranks_text(together)}] {line}".rstrip())
    if printed < total:
        shown.append(f"… {total - printed:,} lines more, all of them in result.output[rank]")
    return "\n".join(shown)


def show(text: str) -> None:
    """Print; what stdout can't encode as "?", and nothing where nobody reads any more."""
    with contextlib.suppress(OSError):  # a closed pipe must not cost the run its values
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            known = getattr(sys.stdout, "encoding", None) or "ascii"
            print(text.encode(known, "replace").decode(known), flush=True)


class Tail:
    """Shows the lines of rank 0 as they come, once a run has lasted LIVE_AFTER seconds."""

    def __init__(self, path: str, say: Callable[[str], None] = show):
        self.path, self.start, self.say = path, time.monotonic(), say
        self.lines = 0
        # Off where outputs are compared: whether a run is "long" depends on the machine.
        self.on = os.environ.get("SHARDBOOK_LIVE", "1") != "0"

    def poll(self) -> None:
        """Show what is new."""
        if not self.on or time.monotonic() - self.start < LIVE_AFTER:
            return
        self.start = time.monotonic() - LIVE_AFTER + 0.2  # five times a second
        lines = read(self.path).split("\n")[:-1]
        for line in lines[self.lines : SHOWN_LINES]:
            self.say(f"[rank 0] {line[:SHOWN_CHARACTERS]}")
        self.lines = max(self.lines, min(len(lines), SHOWN_LINES))

    def rest(self, outputs: Sequence[str]) -> dict[int, str]:
        """What is still to be shown, by rank: without rank 0's lines, and without their copies."""
        if not self.lines:
            return dict(enumerate(outputs))
        rest = {r: text for r, text in enumerate(outputs) if r and text != outputs[0]}
        rest[0] = "\n".join(outputs[0].splitlines()[self.lines :])
        return rest
