"""Chapter 21, gradients in buckets that leave during backward."""

import tempfile

import torch

from ..compare import close, expect, random, same
from ..report import check
from .bucket_runs import (
    Branches,
    Deep,
    branched,
    constructed,
    deep_alone,
    frozen_run,
    held_up_by,
    interrupted,
    partly_frozen,
    trained_in_groups,
    trained_on,
)
from .gradients import SIZES, gradient_calls, near, scales


@check("BucketedDataParallel")
def bucketed_data_parallel(answer, report):
    """Broadcast, means, buckets, overlap, accumulation, unused parameters, groups."""
    names = [n for n, _ in Deep(0).named_parameters()]
    sizes = [p.nbytes for p in Deep(0).parameters()]
    limit = 900
    state = {}

    def trained():  # one run serves several properties
        if "values" not in state:
            state["values"] = report.ranks(trained_on, 4, answer, limit)
        return state["values"]

    with report.property(
        "all ranks start with the parameters and buffers of the first",
        hint="broadcast every parameter and every buffer from the group's first rank",
    ):
        first = Deep(0).state_dict()
        for rank, start in enumerate(report.ranks(constructed, 4, answer)):
            for name, expected in first.items():
                close(start[name], expected, f"{name} on rank {rank}", 0.0)
    with report.property(
        "gradients after finish() are those of the whole batch, step after step",
        hint="finish() must wait for every bucket, divide the sum by the number of ranks, and "
        "leave everything ready for the next backward",
    ):
        oracle = deep_alone(4)
        for steps in trained():
            for step, (grads, *_) in enumerate(steps):
                for name in names:
                    what = f"the gradient of {name} in step {step}"
                    expect(grads[name] is not None, f"{what} is None")
                    near(grads[name], oracle[step][name], what, scales(4))
    with report.property(
        "one all-reduce a bucket, no byte more than the gradients",
        hint="a bucket takes parameters until the next one would not fit in bucket_bytes, and "
        "leaves in one all-reduce of one flat tensor",
    ):
        for steps in trained():
            for _, log, _, _ in steps:
                sent = gradient_calls(log, len(names))
                moved, largest = sum(c.nbytes for c in sent), max(c.nbytes for c in sent + log)
                expect(
                    moved == sum(sizes),
                    f"{moved} bytes went through collectives, the gradients have {sum(sizes)}",
                )
                expect(
                    largest <= limit + max(sizes),
                    f"one message has {largest} bytes where bucket_bytes is {limit}",
                )
                most = 2 * -(-sum(sizes) // limit)  # first fit leaves a bucket at least half full
                expect(
                    len(sent) <= most,
                    f"{len(sent)} messages for {sum(sizes)} bytes in buckets of {limit}, "
                    f"expected at most {most}",
                )
        for steps in report.ranks(trained_on, 2, answer, None, size=2):
            sent = gradient_calls(steps[1][1], len(names))
            expect(len(sent) == 1, f"{len(sent)} messages where all fits in one bucket of 25 MB")
    with report.property(
        "buckets leave during backward, last layers first",
        hint="register_post_accumulate_grad_hook tells when a gradient is there; start a bucket "
        "when it is full, not in finish(); fill the buckets from the last parameter to the first",
    ):
        for steps in trained():
            for _, log, stamps, _ in steps:
                sent = gradient_calls(log, len(names))
                early = [c for c in sent if c.start_ns < stamps[0]]
                expect(
                    len(early) > 0, "no all-reduce started before the backward pass had finished"
                )
                expect(
                    len(early) >= len(sent) - 1,
                    f"only {len(early)} of {len(sent)} buckets started before the backward pass "
                    "had finished",
                )
                expect(
                    sent[0].start_ns < stamps[3],
                    "when backward was half through, the first bucket had not left: it does not "
                    "hold the last layers",
                )
    with report.property(
        "backward does not wait for the other ranks",
        hint="start all-reduce with async_op=True in the hook and wait for the work in finish()",
    ):
        with tempfile.TemporaryDirectory() as folder:
            held_up = report.ranks(held_up_by, 4, answer, folder)
        expect(not held_up[1], "rank 0 could not go on with its backward while rank 1 was slow")
    with report.property(
        "no_sync() accumulates without sending, the next backward sends the sum",
        hint="inside no_sync the hook returns at once; outside it the bucket sends p.grad, which "
        "holds the sum of the micro-batches; an error inside leaves it too: try … finally",
    ):
        oracle = deep_alone(4, micro=3)
        factors = scales(4) | {
            1
            / 3: "divided by the 3 micro-batches again: the loss of each was, before its backward",
            3: "3 times too much: each of the 3 micro-batches was added up more than once",
        }
        for steps in report.ranks(trained_on, 4, answer, limit, micro=3):
            for step, (grads, log, stamps, quiet) in enumerate(steps):
                expect(quiet == 0, f"{quiet} collective calls were made under no_sync()")
                moved = sum(c.nbytes for c in gradient_calls(log, len(names)))
                expect(moved == sum(sizes), f"{moved} bytes sent for {sum(sizes)} of gradients")
                first = min(c.start_ns for c in gradient_calls(log, len(names)))
                expect(
                    first < stamps[0],
                    "the backward after no_sync() no longer sends while it computes",
                )
                for name in names:
                    what = f"the accumulated gradient of {name} in step {step}"
                    near(grads[name], oracle[step][name], what, factors)
        oracle = deep_alone(4, steps=1)[0]
        for grads, sent in report.ranks(interrupted, 4, answer):
            expect(sent > 0, "once an error was raised under no_sync(), backward sends nothing")
            for name in names:
                close(grads[name], oracle[name], f"after an error, the gradient of {name}")
    with report.property(
        "parameters that a rank did not use count as zero, and nothing hangs",
        hint="finish() starts the buckets that backward did not fill, with zeros for what is "
        "missing; start buckets in their own order on every rank, also if a later one fills first",
    ):
        alone = Branches()
        (sum(alone.loss(rank) for rank in range(4)) / 4).backward()
        for grads in report.ranks(branched, 4, answer):
            for name, p in alone.named_parameters():
                if p.grad is not None:
                    close(grads[name], p.grad, f"the gradient of {name!r}")
                elif grads[name] is not None:
                    zero = torch.zeros_like(p)
                    close(grads[name], zero, "the gradient of what no rank used", 0.0)
    with report.property(
        "frozen parameters start as the first rank's and stay frozen",
        hint="broadcast all parameters, but put only those with requires_grad into buckets: a "
        "frozen one gets no gradient, so a bucket that waits for it never fills",
    ):
        alone = partly_frozen(0)
        losses = [alone(random(4, 5, seed=30 + r)).square().mean() for r in range(2)]
        (sum(losses) / 2).backward()
        for grads, after, trained_ones in report.ranks(frozen_run, 2, answer):
            same(trained_ones, [False, False, True, True], "requires_grad of the parameters")
            for name, p in alone.named_parameters():
                close(after[name], p.detach(), f"the parameter {name}", 0.0)
                if p.requires_grad:
                    close(grads[name], p.grad, f"the gradient of {name}")
                else:
                    expect(grads[name] is None, f"the frozen {name} has got a gradient")
    with report.property(
        "groups of 1 to 4 ranks work on their own",
        hint="pass group= to every collective; the group's first rank need not be global rank 0",
    ):
        oracles = {size: deep_alone(size) for size in SIZES}
        for results in report.ranks(trained_in_groups, 4, answer):
            for size, steps in results:
                for step, (grads, *_) in enumerate(steps):
                    for name in names:
                        what = f"the gradient of {name} on {size} rank{'s' * (size > 1)}"
                        near(grads[name], oracles[size][step][name], what, scales(size))
