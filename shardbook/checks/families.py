"""Families of properties, said once. A chapter states names, data and hints.

How a check is written. First what is run, then a line a property, in the order in which a learner
should mend them: value, input kept, gradient, other inputs, traffic, memory, refusals.

In one process, a function is compared with an oracle that computes the same in another way::

    it = report.function(answer, lambda x, h: torch.stack(x.chunk(h, -1), 1))
    it.value("gives head h channels h*D to (h+1)*D", (x, 3), hint="cut the last dimension …")
    it.view("copies nothing when the input is contiguous", (x, 3), hint="use unflatten …")
    it.value("takes inputs of any strides", *[(y, 3) for y in strided(5, 2, 12)], hint="…")
    it.gradient("passes the gradient back", (x, 3), hint="stay with differentiable operations")
    it.refuses("refuses …", ((x, 5), "12 channels for 5 heads"), hint="raise ValueError when …")

On ranks, a case is run on all groups and seen (see `seen`); it starts when a property reads it::

    def _case(answer, here, kv_heads):
        q, k = (here.part(x, dim=2) for x in _whole(kv_heads))
        return here.see(lambda q, k: answer(q, k, group=here.group), grad=…, q=q, k=k)

    seen = report.on_groups(_case, answer, 6)
    seen.value("out and gradients equal …", expected, hint=hints("…", hang="…"))
    seen.keeps_input(hint="…")
    seen.one_collective("one all-reduce each way", "all_reduce", "all_reduce", nbytes, hint="…")
    seen.holds("sends to the next rank", lambda s: expect(…, f"{s.where} sends …"), hint="…")

`expected(s)` gives a tensor, a list, or {name: tensor}: "out" for the value, "dq" for the gradient
of the input q. What fits no family stays a ``with report.property(…)`` block of its own, in which
``for s in seen`` and ``seen.each(judge)`` go over all ranks. A hint is a str, or `hints(…)` by kind
of failure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import calls
from .compare import agree, all_close, expect, listed
from .seen import Runs, Seen
from .wrong import Hint


class OnGroups(Runs):
    """Properties of what ranks saw; see `seen`."""

    def __init__(self, report: Any, *args):
        super().__init__(*args)
        self.report = report

    def holds(self, name: str, judge: Callable[[Seen], None], hint: Hint) -> None:
        """What `judge` expects of what each rank saw."""
        with self.report.property(name, hint):
            self.each(judge)

    def value(
        self, name: str, expected: Callable[[Seen], Any], hint: Hint, tolerance: float = 1e-5
    ) -> None:
        """What every rank returned, and its gradients where they are expected too."""
        self.holds(name, lambda s: agrees(s, expected(s), tolerance), hint)

    def keeps_input(self, hint: Hint, name: str = "leaves its input as it was") -> None:
        """No rank writes into what it was given."""
        self.holds(name, kept, hint)

    def second_call(self, name: str, hint: Hint) -> None:
        """What a call gave is not changed by the next one."""
        said = "a second call changed what the first one gave on"
        self.holds(name, lambda s: expect(not s.changed, f"{said} {s.where}", "kept"), hint)

    def only(self, name: str, ops: Sequence[str], hint: Hint) -> None:
        """No call but these, forward and backward."""

        def judge(s: Seen) -> None:
            other = [c.op for c in [*s.forward, *s.backward] if c.op not in ops]
            expect(not other, f"{s.where} calls {listed(dict.fromkeys(other))}", "traffic")

        self.holds(name, judge, hint)

    def one_collective(
        self, name: str, forward: str, backward: str, nbytes: Callable[[Seen], int], hint: Hint
    ) -> None:
        """One collective each way, of these bytes; "" is none. A rank alone may leave it out."""

        def judge(s: Seen) -> None:
            for way, log, op in (
                ("forward", s.forward, forward),
                ("backward", s.backward, backward),
            ):
                if s.size > 1 or log:
                    one_call(log, op, nbytes(s), f"{way} on {s.where}")

        self.holds(name, judge, hint)

    def at_most(
        self,
        name: str,
        said: str,
        found: Callable[[Seen], float],
        most: Callable[[Seen], float],
        hint: Hint,
    ) -> None:
        """A number of every rank within its limit; `said` is "saves {} elements for backward"."""

        def judge(s: Seen) -> None:
            has, limit = found(s), most(s)
            text = f"{s.where} {said.format(f'{has:.0f}')}, expected at most {limit:.0f}"
            expect(has <= limit, text, "memory")

        self.holds(name, judge, hint)

    def refused(self, name: str, hint: Hint) -> None:
        """Every rank refused what its case gave: `Seen.refused` says what was wrong with that."""
        self.holds(name, lambda s: expect(not s.refused, s.refused, "refusal"), hint)


# What a judge says


def agrees(s: Seen, want: Any, tolerance: float = 1e-5) -> None:
    """The value of one rank; in a mapping "out" is the value and "dq" the gradient of input q."""
    if isinstance(want, Mapping):
        got = {"out": s.value} | {f"d{name}": grad for name, grad in s.grads.items()}
        pairs = {name: (got.get(name), w) for name, w in want.items()}
        all_close(pairs, f"on {s.where}{_case(s)}", tolerance)
    else:
        agree(s.value, want, f"the result on {s.where}{_case(s)}", tolerance)


def kept(s: Seen) -> None:
    """This rank left its input as it was."""
    expect(s.kept, f"the input was changed on {s.where}{_case(s)}", "kept")


def _case(s: Seen) -> str:
    return f" for {s.case}" if s.case is not None else ""


def one_call(log: list[calls.Call], op: str, nbytes: int, where: str) -> None:
    """Exactly one call of op about nbytes, or none at all where op is ""."""
    found = calls.summary(log)
    said = ", ".join(f"{n} {o} of {b} bytes" for o, (n, b) in found.items()) or "no collective"
    wanted = {op: (1, nbytes)} if op else {}
    asked = f"one {op} of {nbytes} bytes" if op else "no collective"
    expect(found == wanted, f"{where} makes {said}; expected {asked}", "traffic")
