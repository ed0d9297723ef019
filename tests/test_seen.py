"""Runs on ranks that checks read: named, made once, the world first, a failure told once."""

import re

import pytest
import torch
import torch.distributed as dist

from shardbook.checks.compare import close, expect, random
from shardbook.checks.report import Report, check
from shardbook.checks.seen import WORLD, Here, Seen
from shardbook.checks.wrong import hints

pytestmark = pytest.mark.usefixtures("on_cpu")


def total(x, group=None):
    """An all-reduce whose gradient is not reduced."""
    y = x.clone()
    dist.all_reduce(y.detach(), group=group)
    return y


def case(answer, here: Here, scale: float = 1.0) -> Seen:
    x = random(3, 4, 5, seed=here.place) * scale
    return here.see(lambda x: answer(x, **here.options), torch.ones(3, 4, 5), x=x)


def summed(s: Seen):
    return sum(random(3, 4, 5, seed=place) for place in range(s.size))


def sums(answer, report):
    seen = report.on_groups(case, answer)
    seen.value("sums", lambda s: {"out": summed(s), "dx": torch.ones(3, 4, 5)}, hint="add up")
    seen.keeps_input(hint="copy first")
    seen.one_collective("one all-reduce", "all_reduce", "", lambda s: 240, hint="no more")
    seen.at_most("saves nothing", "saves {} elements", lambda s: s.saved, lambda s: 0, hint="-")


examine = check("sums")(sums).examine


def verdict(answer):
    found = examine(answer)
    return [p.status for p in found.properties], [p.detail for p in found.properties], found


def test_what_ranks_saw_has_names():
    found = list(Report("x").on_groups(case, total))
    assert [s.ranks for s in found] == [
        *[(0, 1, 2, 3)] * 4, *[(0, 2, 3)] * 3, (1,), *[(1, 3)] * 2, *[(0, 2)] * 2
    ]  # fmt: skip
    assert [s.place for s in found] == [0, 1, 2, 3, 0, 1, 2, 0, 0, 1, 0, 1]
    for s in found:
        close(s.value, summed(s), s.where)
        close(s.grads["x"], torch.ones(3, 4, 5), s.where)
        assert [c.op for c in s.forward] == ["all_reduce"] and not s.backward
        assert s.kept and not s.aliased and s.saved == 0 and s.size == len(s.ranks)
        assert s.rank == s.ranks[s.place]
    assert found[1].where == "rank 1 of 4"
    assert found[5].where == "rank 1 of 3 in the group of ranks 0, 2 and 3"
    assert verdict(total)[2].status == "right"


def test_cases_are_given_in_turn_and_the_world_alone_on_request():
    seen = Report("x").on_groups(case, total, cases=[1.0, 2.0], rounds=WORLD)
    assert [(s.case, s.place) for s in seen] == [(c, r) for c in (1.0, 2.0) for r in range(4)]


def test_a_case_that_fails_spoils_no_other():
    @check("x")
    def three(answer, report):
        seen = report.on_groups(case, answer, cases=[1.0, 2.0, 3.0])
        for scale in (1.0, 2.0, 3.0):
            seen.of(scale).value(
                f"sums {scale}", lambda s: {"out": summed(s) * s.case}, hint=f"mend {scale}"
            )

    def small_ones(x, group=None):
        if x.abs().max() > 4 and group is not None:
            raise ValueError("too large")
        return total(x, group)

    assert three.examine(total).status == "right"
    found = three.examine(small_ones)
    assert [p.status for p in found.properties] == ["ok", "failed", "not examined"]
    assert found.hint == "mend 2.0"
    assert found.properties[1].detail.startswith("for 2.0 in the group of ranks 0, 2 and 3")


def test_the_algorithm_is_judged_before_the_groups():
    def wrong_and_no_groups(x, group=None):
        if group is not None:
            raise ValueError("what is a group?")
        return total(x) * 2

    status, said, found = verdict(wrong_and_no_groups)
    first, _, then = said[0].partition("; then, ")
    assert "out on rank 0 of 4 is off by" in first and "dx is wrong too" in first
    assert then.startswith(
        "in the group of ranks 0, 2 and 3 and the group of rank 1: "
        "ranks 0-3 raised ValueError: what is a group? (test_seen.py:"
    )
    assert "    seen.py" not in then
    # what the world did is judged for the other properties; they can't hold without the groups
    assert status == ["failed", "not examined", "not examined", "not examined"]
    assert found.hint == "add up"


def test_a_failure_on_groups_has_its_own_hint():
    @check("x")
    def one(answer, report):
        by_group = hints("add up", group="count in the group", raised="no")
        report.on_groups(case, answer).value("sums", lambda s: {"out": summed(s)}, hint=by_group)

    def raises_in_groups(x, group=None):
        if group is not None:
            raise ValueError("what is a group?")
        return total(x)

    assert one.examine(lambda x, group=None: total(x)).hint == "count in the group"
    assert one.examine(raises_in_groups).hint == "count in the group"
    assert one.examine(lambda x, group=None: 2 * total(x, group)).hint == "add up"


def test_which_groups_hold_is_told():
    def by_rank_of_the_world(x, group=None):
        return total(x, group) + (dist.get_world_size(group) == 3)

    _, said, _ = verdict(by_rank_of_the_world)
    assert re.fullmatch(
        r"out on rank 0 of 3 in the group of ranks 0, 2 and 3 is off by 1 at \[\d, \d, \d\] "
        r"\(tolerance 1e-05\); dx holds; it holds on 4, 2 and 1 ranks",
        said[0],
    )


def test_a_collective_on_the_wrong_group_is_told():
    def world_always(x, group=None):
        total(x)
        return total(x, group)

    seen = Report("x").on_groups(case, world_always)
    with pytest.raises(AssertionError) as found:
        seen.each(lambda s: None)
    assert str(found.value) == ("all_reduce ran on ranks [0, 1, 2, 3], the group was [0, 2, 3]")


def test_a_hang_in_a_group_leaves_what_the_world_did():
    def waits(x, group=None):
        if group is not None and dist.get_rank() == 2:
            return x.clone()
        return total(x, group)

    found = check("sums")(sums).examine(waits, timeout=10)
    (only,) = found.properties
    assert only.status == "failed" and found.hint == "add up"
    assert "in the group of ranks 0, 2 and 3" in only.detail
    assert "never entered all_reduce" in only.detail


def test_writes_into_the_input_and_missing_gradients_are_seen():
    def in_place(x, group=None):
        with torch.no_grad():
            dist.all_reduce(x, group=group)
        return x * 1

    seen = list(Report("x").on_groups(case, in_place))
    assert not seen[0].kept and next(s for s in seen if s.size == 1).kept
    view = Report("x").on_groups(case, lambda x, group=None: x.view(-1)[:60].view(3, 4, 5))
    assert all(s.aliased for s in view)
    with pytest.raises(AssertionError, match="carries no gradient"):
        list(Report("x").on_groups(case, lambda x, group=None: x.detach()))


def test_a_run_is_read_as_often_as_one_likes_and_made_once(monkeypatch):
    report, made = Report("x"), []
    run = report._run
    monkeypatch.setattr(report, "_run", lambda *a, **k: made.append(a) or run(*a, **k))
    for _ in range(2):
        for s in report.on_groups(case, total, 2.0):
            expect(s.kept, "kept")
    assert len(made) == 1
