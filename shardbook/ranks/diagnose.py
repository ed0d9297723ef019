"""What each rank was doing when a run failed or hung, in words."""

import linecache
import re
import traceback
import types
from collections import defaultdict

from ..words import at, foreign, hidden, learners, place, ranks_text
from . import mismatch, waits
from .ledger import Ledger
from .log import Rank

LONG = 4000  # characters of an exception's text; .causes has it whole
MOST_LINES = 5  # that led to an exception
MAKE_GROUPS = {"new_group", "new_subgroups", "split_group", "init_device_mesh"}
_STAMP = re.compile(r"^\[rank\d+\]:\s*\[[A-Z]\d{4} [\d:.]+ [^\]]*\]\s*")  # glog's, before its text


def hang(ranks: list[Rank], ledger: Ledger, stacks: dict[int, str], ended: str) -> str:
    """Why the run does not end, who waits for whom, and where the others are.

    `ended` is "ended after 4 s", or "interrupted after 4 s"; "" if it is clear without a deadline.
    """
    doing = {r.rank: _doing(r, ledger, stacks) for r in ranks}
    stuck = waits.stuck(ranks, ledger)
    told: set[int] = set()
    if head := mismatch.astray(list(stuck.values()), ledger):
        pass
    else:
        head, told = waits.headline(ranks, ledger)
    if head:
        head += f" ({ended})" if ended else ""
    else:
        head = ended.replace("ended after", "no end after") or "no rank can go on"
    told -= {r for r, e in stuck.items() if e.handling}  # what hides there is still to be said
    return "\n".join([head, *_grouped({r: t for r, t in doing.items() if r not in told})])


def _doing(rank: Rank, ledger: Ledger, stacks: dict[int, str]) -> str:
    if rank.died is not None:
        return rank.died
    if rank.returned:
        return "returned"
    entry = rank.last_wait if rank.finished else next(iter(rank.waiting.values()), None)
    if entry is not None:
        behind = f", while handling {entry.handling}" if entry.handling else ""
        return f"waiting in {ledger.name(entry)}{at(entry.where)}{behind}"
    if not rank.started:
        return "not started"
    line = stacks.get(rank.rank)
    return f"at {line}" if line else "still running"


def _grouped(said: dict[int, str]) -> list[str]:
    by_text: dict[str, list[int]] = defaultdict(list)
    for r, text in said.items():
        by_text[text].append(r)
    return [f"  {ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]


def states(ranks: list[Rank], ledger: Ledger, leave_out: set[int]) -> list[str]:
    """A line for what the other ranks were doing, those that did the same together."""
    return _grouped({r.rank: _doing(r, ledger, {}) for r in ranks if r.rank not in leave_out})


def stack_line(text: str) -> str:
    """ "cell line 3 in step: time.sleep(100)" from what faulthandler wrote, the main thread's."""
    main = re.findall(r'File "(.*)", line (\d+) in (.*)', text.split("\n\n")[-1])[::-1]
    return _line(main[main[:1] == [("<string>", "1", "<module>")] :])  # the fork server's own


def frame_line(frame: types.FrameType) -> str:
    """The same from a frame of this process."""
    return _line([(f.filename, f.lineno, f.name) for f in traceback.extract_stack(frame)])


def _line(frames: list[tuple]) -> str:
    found = learners(frames)
    if found is None:
        return ""
    makes_groups = any(name in MAKE_GROUPS and hidden(file) for file, _, name in frames)
    return _source(*found) + (", which every rank must call" if makes_groups else "")


def _source(file: str, line: int | str, function: str) -> str:
    source = linecache.getline(file, int(line)).strip()
    return f"{place(file, line)} in {function}" + (f": {source}" if source else "")


def lost_connection(error: BaseException) -> bool:
    """What gloo raises on the ranks that talked to one that has died."""
    return isinstance(error, RuntimeError) and bool(
        re.search(r"Connection (closed|reset) by peer|Broken pipe", str(error))
    )


def raised(error: BaseException, links: list[tuple]) -> str:
    """What a rank raised and where, and the lines that led there; to be read after "rank 2 ".

    `links` has (type, text, frames) of the error and of what it was raised from.
    """
    (name, text, frames), *causes = links
    own = learners(frames)
    line = f" ({place(*own[:2])})" if own else ""
    if isinstance(error, SystemExit):
        head = f"called sys.exit({'' if error.code is None else repr(error.code)}){line}"
    else:
        head = f"raised {_said(name, text)}{line}"
    lines = [f"    {_source(*frame)}" for frame in _shown(frames)]
    for name, text, frames in causes:
        own = learners(frames)
        line = f" ({place(*own[:2])})" if own else ""
        lines.append(f"    caused by {_said(name, text)}{line}")
    return "\n".join([head, *lines])


def whole(links: list[tuple]) -> str:
    """Every line that led to the error, the machinery's too: a note for the exception."""
    frames = [(file, number, function, None) for file, number, function in links[0][2]]
    return "Traceback of the rank:\n" + "".join(traceback.format_list(frames)).rstrip()


def _said(name: str, text: str) -> str:
    text = _STAMP.sub("", text.strip())
    if len(text) > LONG:
        text = f"{text[:LONG]} … ({len(text):,} characters)"
    return f"{name}: {text}" if text else name


def _shown(frames: list[tuple]) -> list[tuple]:
    """The last lines that are no machinery, with the learner's innermost among them."""
    shown = [f for f in frames if not hidden(f[0])]
    last = shown[-MOST_LINES:]
    own = learners(frames)
    if own is None or own in last or foreign(own[0]):
        return last
    return [own, *last[1:]]


def folded(said: dict[int, str]) -> dict[str, list[int]]:
    """Texts of ranks -> the ranks that said it; the same but for the rank's own number is one."""
    by_key: dict[str, list[int]] = defaultdict(list)
    for r, text in said.items():
        by_key[re.sub(rf"\brank {r}\b", "rank \0", text)].append(r)
    found: dict[str, list[int]] = {}
    for key, ranks in by_key.items():
        found.setdefault(key.replace("rank \0", ranks_text(ranks)), []).extend(ranks)
    return found
