"""The differences of two traces in words: one sentence each."""

from collections.abc import Sequence

from .align import Column
from .steps import P2P, Step


def sentence(rank: int, at: int, columns: list[Column]) -> str:
    """How the trace of a rank differs in one of its columns."""
    c = columns[at]
    x, y = c.expected, c.got
    if c.swapped:
        there = next(o for o in columns[at + 1 :] if o.swapped)
        return (
            f"steps {c.step} and {there.step} are swapped: expected {full(x, y)} first, got "
            f"{brief(y, x)}"
        )
    start = f"step {c.step}: expected "
    following = next((o.got for o in columns[at + 1 :] if o.got is not None), None)
    wanted = next((o.expected for o in columns[at + 1 :] if o.expected is not None), None)
    if y is None and c.moved is not None:
        return start + f"{full(x, following)}, which comes as step {c.moved + 1}"
    if x is None and c.moved is not None:
        next_ = full(wanted, y) if wanted else "nothing more"
        return start + f"{next_}, got {full(y, wanted)}, which is expected as step {c.moved + 1}"
    if y is None and following is None:
        last = next((o.got for o in reversed(columns[:at]) if o.got is not None), None)
        made = f"ends after step {c.j} ({full(last)})" if last else "has no calls"
        return start + f"{full(x)}, got nothing: rank {rank}'s trace {made}"
    if y is None:
        return start + f"{full(x, following)}, which is missing: {full(following, x)} comes next"
    if x is None:
        next_ = full(wanted, y) if wanted else "nothing more"
        return start + f"{next_}, got {full(y, wanted)}, which is one too many"
    return start + f"{full(x, y)}, got {brief(y, x)}"


def full(step: Step, beside: Step | None = None) -> str:
    """``all_reduce of 4,096 bytes on group tp``; and what else makes it another than `beside`."""
    if step.detail:
        return f"{step.op} ({step.detail})"
    text = step.op + ("" if step.op == "barrier" else f" of {step.nbytes:,} bytes")
    text += _kind(step, beside) + _peer(step)
    if step.op in P2P and (beside is None or _group(step) == _group(beside)):
        return text
    return text + f" on {group_text(step, beside)}"


def brief(step: Step, beside: Step) -> str:
    """The same, without what `beside` has said already."""
    if step.detail or beside.detail:
        return full(step)
    size = f" of {step.nbytes:,}" + ("" if beside.op != "barrier" else " bytes")
    text = step.op + ("" if step.op == "barrier" else size) + _kind(step, beside)
    if step.peer != beside.peer or step.op != beside.op:
        text += _peer(step)
    if _group(step) != _group(beside):
        text += f" on {group_text(step, beside)}"
    return text


def _kind(step: Step, beside: Step | None) -> str:
    """How it reduces and of what dtype, where that makes it another call than `beside`."""
    if beside is None or step.op != beside.op:
        return ""
    told = [(step.reduce, beside.reduce), (step.dtype, beside.dtype)]
    differing = [mine for mine, other in told if mine and other and mine != other]
    return f" ({', '.join(differing)})" if differing else ""


def _peer(step: Step) -> str:
    if step.peer is None:
        return ""
    word = "from" if step.op in ("recv", "broadcast", "scatter") else "to"
    return f" {word} rank {step.peer}"


def _group(step: Step) -> tuple:
    return step.group, step.label, step.twin


def group_text(step: Step, beside: Step | None = None) -> str:
    """``group tp``, ``ranks 0-3``, and which, where there are several of the same ranks."""
    text = f"group {step.label}" if step.label else ranks_text(step.group)
    if step.label and beside is not None and step.group != beside.group:
        text += f" ({ranks_text(step.group)})"
    if beside is not None and step.group == beside.group and step.twin != beside.twin:
        text += f" (group {step.twin + 1} of these)"
    return text


def ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 0-3``, ``ranks 0, 2 and 5``, ``rank 1``."""
    ranks = list(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def count(n: int, what: str) -> str:
    """``1 rank``, ``2,000 ranks``."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
