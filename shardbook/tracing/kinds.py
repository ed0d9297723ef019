"""What a slice is coloured by, and the colours."""

import re
from collections import defaultdict

from .lanes import PACED, Slice, Track
from .palette import KINDS, OTHER

BRIGHT, PALE = KINDS[:7], KINDS[7:]
# The operations of a pipeline, named and coloured as in the charts of schedules.
PIPELINE = {
    "F": ("forward", BRIGHT[4]),
    "B": ("backward", BRIGHT[1]),
    "I": ("input gradient", BRIGHT[3]),
    "W": ("weight gradient", BRIGHT[2]),
}
_OPERATION = re.compile(r"([FBIW])\d+(?: chunk (\d+))?\b")


def kind(s: Slice) -> str:
    """A slice's module type, its collective, its pipeline operation, its category, its name."""
    if s.cat in ("collective", "p2p"):
        return s.name.split(" ")[0]  # "send to 3" is a send
    if s.cat in PACED and (found := _OPERATION.match(s.name)):
        chunk = f" (chunk {found[2]})" if int(found[2] or 0) else ""
        return PIPELINE[found[1]][0] + chunk
    return str(s.args.get("type") or s.cat or s.name)


def number(tracks: list[Track]) -> list[tuple[str, str]]:
    """Number the kinds by the time spent in each alone, and give each its colour.

    What mostly holds other slices (a block, the model) is pale, what works itself is bright. Beside
    kernels whose length was set all else is pale: it is what the kernels wait for.
    """
    own, whole, paced = defaultdict(int), defaultdict(int), set()
    kinds: dict[int, str] = {}
    for track in tracks:
        for s in track.slices:
            k = kinds[id(s)] = kind(s)
            own[k] += s.own
            whole[k] += s.dur
            if s.cat in PACED:
                paced.add(k)
    ranked = sorted(own, key=lambda k: (k not in paced, -own[k], k))
    place = {k: i for i, k in enumerate(ranked)}
    for track in tracks:
        for s in track.slices:
            s.kind = place[kinds[id(s)]]
    fixed = {k: c for k in ranked if k in paced and (c := _pipeline(k))}
    bright = iter([c for c in BRIGHT if c not in fixed.values()])
    pale = iter([c for c in PALE if c not in fixed.values()])
    out = []
    for k in ranked:
        works = own[k] * 3 >= whole[k] and (not paced or k in paced)
        colour = fixed.get(k) or (next(bright, None) if works else next(pale, None))
        out.append((k, colour or next(pale, None) or OTHER))
    return out


def _pipeline(name: str) -> str | None:
    """The colour of a pipeline's operation; of a further chunk, half of it and half white."""
    plain, _, chunk = name.partition(" (chunk ")
    colour = dict(PIPELINE.values()).get(plain)
    if colour and chunk:
        parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{round(p * 0.5 + 127.5):02X}" for p in parts)
    return colour
