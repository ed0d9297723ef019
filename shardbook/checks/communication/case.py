"""What the checks of collectives share: inputs, runs on groups, what every one must do."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ... import calls
from ...devices import device
from ..compare import close, random
from ..families import OnGroups
from ..report import Report
from ..seen import Here, Seen
from ..wrong import Hint, hints

MEMBERS = (
    "inside a group dist.get_rank(group) counts from 0, but the peer of send and recv, like src, "
    "is a rank of the world: use group_dst, group_src or group_peer, or dist.get_global_rank"
)
MESSAGES = "use send, recv, isend, irecv or batch_isend_irecv, and no collective"
STRIDES = (
    "send and recv take contiguous tensors: copy what isn't, receive into a fresh contiguous "
    "buffer (empty_like keeps strides), and give the result x's shape and dtype"
)
UNCHANGED = "add into a buffer of your own: the input is the caller's"
WAITS = (
    "every message needs its send and its receive, and a plain send may wait for the receive: "
    "start one of the two with isend or irecv, wait for it after the other, and let each rank take "
    "part in every step"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One input, and the number that some calls take: the source's place, or ranks per node."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = ""
    number: int = 0

    def __str__(self) -> str:
        words = [self.layout, str(self.dtype)[6:], f"x {list(self.shape)}"]
        return " ".join(word for word in words if word)

    @property
    def numel(self) -> int:
        """How many elements x has."""
        return torch.Size(self.shape).numel()


# On a rank


def tensor(case: Case, member: int, world: int) -> Tensor:
    """The input of a member, the same shape on every one."""
    *front, last = case.shape or (1,)
    if case.layout == "transposed":
        return drawn(case.dtype, member, last, *front).mT
    if case.layout == "strided":
        return drawn(case.dtype, member, *front, 2 * last)[..., ::2]
    if case.layout == "expanded":
        return drawn(case.dtype, member, *front, 1).expand(case.shape)
    return drawn(case.dtype, member, *case.shape)


def drawn(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    """Random values of a dtype on this rank's device."""
    x = random(*(shape or (1,)), seed=seed + 1).reshape(shape)
    return (x if dtype.is_floating_point else x * 100).to(dtype).to(device())


def strides_and_dtypes(shape: tuple[int, int]) -> list[Case]:
    """Inputs of a shape, laid out or typed in another way."""
    layouts = [Case(shape, layout=layout) for layout in ("transposed", "strided", "expanded")]
    return layouts + [Case(shape, dtype) for dtype in (torch.bfloat16, torch.int64)]


def plain(answer: Callable, here: Here, case: Case) -> Seen:
    """On a rank: the answer on this member's input."""
    x = tensor(case, here.place, here.size)
    return here.see(lambda x: answer(x, **here.options), x=x)


# In the check


def run(report: Report, answer: Callable, cases: list[Case], fn: Callable = plain) -> OnGroups:
    """Every case on every group."""
    return report.on_groups(fn, answer, cases=cases)


def equals(seen: OnGroups, name: str, expected: Callable, hint: Hint) -> None:
    """The result is what `expected` makes of the inputs of all members of the group."""
    seen.holds(name, lambda s: judge(s, expected), hint)


def steps(hint: str) -> Hint:
    """What helps with a wrong result, with one on groups only, and with ranks that wait."""
    return hints(hint, group=MEMBERS, hang=WAITS)


def judge(s: Seen, expected: Callable[[list[Tensor], Seen], Tensor]) -> None:
    """One rank's result is what `expected` makes of all inputs."""
    inputs = [tensor(s.case, place, s.size).cpu() for place in range(s.size)]
    # bf16 keeps 8 bits: each of up to three additions of values near 4 rounds by up to 2^-7
    tolerance = 0.05 if s.case.dtype == torch.bfloat16 else 1e-5
    close(s.value, expected(inputs, s), f"for {s.case} the result on {s.where}", tolerance)


def summed(inputs: list[Tensor], s: Seen) -> Tensor:
    """What an all-reduce gives."""
    if not inputs[0].dtype.is_floating_point:
        return torch.stack(inputs).sum(0)
    return torch.stack(inputs).float().sum(0).to(inputs[0].dtype)


def cheap(seen: OnGroups) -> None:
    """What holds for all of them beside the value."""
    seen.keeps_input(UNCHANGED)
    seen.only("uses messages between two ranks only", ("send", "recv"), MESSAGES)


def elements(call: calls.Call) -> int:
    """How many elements a message carries."""
    return call.nbytes // call.dtype.itemsize
