"""Chapter 23, schedules: who does what when, and how long it takes on a clock of our own."""

import copy
import random as rng

from ..compare import expect, refuses, same
from ..report import check

SHAPES = [(4, 8), (3, 5), (5, 2), (2, 1), (1, 3)]  # (stages, micro-batches)


# ---- an independent clock: longest paths by repeated relaxation


def _play(schedule, forward=1.0, backward=2.0, send=0.0):
    """(makespan, {(rank, kind, microbatch, chunk): (start, end)}); Wrong where it can't run."""
    p = len(schedule)
    chunks = 1 + max(op[2] for stage in schedule for op in stage)
    ops = [(s, *op) for s, stage in enumerate(schedule) for op in stage]
    needs = {}
    for s, stage in enumerate(schedule):
        for at, (kind, i, c) in enumerate(stage):
            before = [((s, *stage[at - 1]), 0.0)] if at else []
            block = c * p + s + (-1 if kind == "F" else 1)
            if kind == "B":
                before.append(((s, "F", i, c), 0.0))
            if 0 <= block < p * chunks:
                other = block % p
                before.append(((other, kind, i, block // p), send if other != s else 0.0))
            needs[s, kind, i, c] = before
    end: dict = {}
    for _ in range(len(ops) + 1):
        changed = False
        for op in ops:
            if op in end or any(n not in end for n, _ in needs[op]):
                continue
            start = max((end[n] + latency for n, latency in needs[op]), default=0.0)
            end[op] = start + (forward if op[1] == "F" else backward)
            changed = True
        if not changed:
            break
    stuck = [op for op in ops if op not in end]
    expect(not stuck, f"the schedule deadlocks: nothing can run before stage {stuck[:1]}")
    cost = {"F": forward, "B": backward}
    return max(end.values()), {op: (t - cost[op[1]], t) for op, t in end.items()}


def peaks_of(schedule: list) -> list[int]:
    """How many micro-batches are alive at once, by stage."""
    out = []
    for stage in schedule:
        live = [0]
        for kind, *_ in stage:
            live.append(live[-1] + (1 if kind == "F" else -1))
        out.append(max(live))
    return out


def _well_formed(schedule, p: int, m: int, v: int) -> None:
    expect(isinstance(schedule, list), f"it is {type(schedule).__name__}, expected a list")
    expect(len(schedule) == p, f"it has {len(schedule)} stages, expected {p}")
    wanted = sorted((kind, i, c) for kind in "FB" for i in range(m) for c in range(v))
    for s, stage in enumerate(schedule):
        got = sorted(tuple(op) for op in stage)
        expect(
            got == wanted,
            f"stage {s} of {p} with {m} micro-batches does {len(got)} operations, expected each "
            f"of the {len(wanted)} (kind, microbatch, chunk) once",
        )


def _runs(report, answer, shapes: list[tuple[int, ...]], hint: str) -> None:
    with report.property(RUNS, hint):
        for p, m, *v in shapes:
            schedule = answer(p, m, *v)
            _well_formed(schedule, p, m, *(v or [1]))
            _play(schedule)


def _in_time(report, answer, shapes: list[tuple[int, ...]], hint: str) -> None:
    with report.property("the time is that of the closed form", hint):
        for p, m, *v in shapes:
            makespan, _ = _play(answer(p, m, *v))
            wanted = 3.0 * ((v or [1])[0] * m + p - 1)  # a chunk's forward takes 1, its backward 2
            chunks = f" of {v[0]} chunks" if v else ""
            same(makespan, wanted, f"the time of {p} stages{chunks} and {m} micro-batches")


RUNS = "each stage does every micro-batch once, and the pipeline runs without deadlock"


@check("gpipe")
def gpipe(answer, report):
    """All forwards, then all backwards."""
    _runs(report, answer, SHAPES, hint='a stage is a list of ("F" or "B", microbatch, 0)')
    with report.property(
        "all forwards come before all backwards, so every micro-batch is live at once",
        hint="GPipe's flush: no backward before the last forward, on every stage",
    ):
        for p, m in SHAPES:
            for s, stage in enumerate(answer(p, m)):
                kinds = "".join(op[0] for op in stage)
                expect(kinds == "F" * m + "B" * m, f"stage {s} runs {kinds} for {m} micro-batches")
    hint = "backwards must leave in an order in which the stage before can use them at once"
    _in_time(report, answer, SHAPES, hint)


@check("one_f_one_b")
def one_f_one_b(answer, report):
    """Backward as early as possible."""
    shapes = [*SHAPES, (4, 3)]
    _runs(report, answer, shapes, hint="count warm-up, steady pairs and the backwards left")
    with report.property(
        "stage s holds at most p - s live micro-batches",
        hint="stage s warms up with p - s - 1 forwards (fewer if there are fewer micro-batches), "
        "then runs one forward and one backward in turn",
    ):
        for p, m in shapes:
            peaks = peaks_of(answer(p, m))
            same(peaks, [min(p - s, m) for s in range(p)], f"live micro-batches ({p} stages, {m})")
    hint = "in the steady state the forward comes before the backward"
    _in_time(report, answer, shapes, hint)


@check("interleaved")
def interleaved(answer, report):
    """Virtual stages."""
    shapes = [(4, 8, 2), (2, 4, 3), (3, 6, 2), (2, 2, 4), (4, 4, 1)]
    _runs(
        report,
        answer,
        shapes,
        hint="micro-batches pass the chunks in groups of p: p of them through chunk 0, the same "
        "through chunk 1, …; backwards take the chunks the other way",
    )
    with report.property(
        "live chunks per stage are 2(p-s-1) + (v-1)p + 1",
        hint="that many forwards, less one, run before the first backward",
    ):
        for p, m, v in shapes:
            wanted = [min(2 * (p - s - 1) + (v - 1) * p + 1, m * v) for s in range(p)]
            if v > 1:  # with one chunk other warm-ups are as good
                same(
                    peaks_of(answer(p, m, v)), wanted, f"live chunks ({p} stages, {m}, {v} chunks)"
                )
    _in_time(report, answer, shapes, hint="warm up, then a forward and a backward in turn")
    with report.property(
        "ValueError where the micro-batches do not divide by the stages",
        hint="groups of p micro-batches need m to be a multiple of p",
    ):
        refuses(answer, 4, 6, 2, what="6 micro-batches on 4 stages")
        refuses(answer, 3, 4, 2, what="4 micro-batches on 3 stages")


def random_schedule(p: int, m: int, v: int, seed: int):
    """A schedule that runs: a random order among what is ready."""
    chooser = rng.Random(seed)
    schedule = [[] for _ in range(p)]
    done: set = set()
    todo = [(s, k, i, c) for s in range(p) for k in "FB" for i in range(m) for c in range(v)]
    while todo:
        ready = []
        for s, k, i, c in todo:
            block = c * p + s
            before = block - 1 if k == "F" else block + 1
            have = not 0 <= before < p * v or (k, i, before) in done
            if have and (k == "F" or ("F", i, block) in done):
                ready.append((s, k, i, c))
        s, k, i, c = chooser.choice(ready)
        todo.remove((s, k, i, c))
        done.add((k, i, c * p + s))
        schedule[s].append((k, i, c))
    return schedule


@check("simulate")
def simulate(answer, report):
    """A schedule against a clock."""
    cases = [
        (random_schedule(p, m, v, seed), times)
        for seed, (p, m, v) in enumerate([(1, 2, 1), (3, 4, 1), (4, 3, 2), (2, 5, 3), (1, 3, 2)])
        for times in ((1.0, 2.0, 0.0), (1.5, 2.25, 0.75), (3.0, 1.0, 4.0))
    ]
    with report.property(
        "makespan and timeline are those of the dependencies",
        hint="an operation starts when its stage is free AND its input has arrived: the forward of "
        "the block before, for a backward that of the block after and its own forward; `send` "
        "counts between different ranks only",
    ):
        for schedule, (forward, backward, send) in cases:
            makespan, times = _play(schedule, forward, backward, send)
            result = answer(schedule, forward, backward, send)
            what = f"{len(schedule)} stages, F {forward}, B {backward}, send {send}"
            got = result["makespan"]
            expect(abs(got - makespan) < 1e-9, f"makespan is {got} for {what}, expected {makespan}")
            line = {tuple(op[:4]): tuple(op[4:]) for op in result["timeline"]}
            expect(len(result["timeline"]) == len(times), f"timeline misses operations for {what}")
            for op, (start, end) in times.items():
                expect(op in line, f"timeline has no (rank, kind, microbatch, chunk) = {op}")
                near = abs(line[op][0] - start) < 1e-9 and abs(line[op][1] - end) < 1e-9
                expect(near, f"{op} runs {line[op]} for {what}, expected {(start, end)}")
    with report.property(
        "leaves the schedule as it was",
        hint="count how far each stage has come; do not take operations out of its list",
    ):
        schedule = random_schedule(3, 4, 1, 7)
        before = copy.deepcopy(schedule)
        answer(schedule)
        expect(schedule == before, "simulate changed the schedule that it was given", "kept")
    with report.property(
        "bubble is the idle share of all ranks' time, and peak_live counts started forwards",
        hint="1 - busy / (ranks * makespan); a micro-batch lives from its forward to its backward",
    ):
        for schedule, (forward, backward, send) in cases:
            makespan, _ = _play(schedule, forward, backward, send)
            result = answer(schedule, forward, backward, send)
            work = sum(forward if op[0] == "F" else backward for stage in schedule for op in stage)
            bubble = 1 - work / (len(schedule) * makespan)
            got = result["bubble"]
            expect(abs(got - bubble) < 1e-9, f"bubble is {got:.4f}, expected {bubble:.4f}")
            same(list(result["peak_live"]), peaks_of(schedule), "peak_live")
    with report.property(
        "defaults: a forward takes 1, a backward 2, sending nothing",
        hint="see the signature in the exercise",
    ):
        schedule = random_schedule(3, 4, 1, 7)
        same(answer(schedule)["makespan"], _play(schedule)[0], "makespan by default")
    with report.property(
        "ValueError for a schedule that deadlocks, or that misses or repeats work",
        hint="stop when no stage can go on; compare what each stage does with what it must do",
    ):
        late = [[("B", 0, 0), ("F", 0, 0)]]
        refuses(answer, late, what="a backward before its forward")
        cross = [
            [("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)],
            [("F", 1, 0), ("B", 1, 0), ("F", 0, 0), ("B", 0, 0)],
        ]
        refuses(answer, cross, what="stages that wait for each other")
        missing = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)], [("F", 0, 0), ("B", 0, 0)]]
        refuses(answer, missing, what="a stage that misses a micro-batch")
        twice = [[("F", 0, 0), ("F", 0, 0), ("B", 0, 0), ("B", 0, 0)]]
        refuses(answer, twice, what="a micro-batch done twice")
        forgotten = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0)] for _ in range(3)]
        refuses(answer, forgotten, what="a backward that every stage misses")


@check("bubble_fraction")
def bubble_fraction(answer, report):
    """The closed form."""
    with report.property(
        "(p-1) / (v m + p - 1), of the whole time",
        hint="the idle slots over ALL slots, not over the busy ones",
    ):
        for p, m in [(4, 8), (2, 3), (7, 5), (1, 4)]:
            for v in (1, 2, 5):
                got, expected = answer(p, m, v), (p - 1) / (v * m + p - 1)
                what = f"the bubble of {p} stages, {m} micro-batches, {v} chunks"
                expect(abs(got - expected) < 1e-12, f"{what} is {got}, expected {expected:.4f}")
    with report.property("one chunk is the default", hint="see the signature in the exercise"):
        expect(abs(answer(4, 8) - 3 / 11) < 1e-12, f"bubble_fraction(4, 8) is {answer(4, 8)}")
