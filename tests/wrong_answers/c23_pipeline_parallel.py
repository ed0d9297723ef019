"""Answers to chapter 23: mistakes engineers make with pipelines, and right ones."""

import torch
import torch.distributed as dist

from shardbook.devices import device
from shardbook.parallel import pipeline, schedules
from shardbook.parallel.pipeline import recv, recv_activation, room, send, send_activation
from tests.wrong_answers import right, wrong

for name in ("gpipe", "one_f_one_b", "interleaved", "simulate", "bubble_fraction"):
    right(name)(getattr(schedules, name))
for name in ("run_pipeline", "sync_tied_embeddings_"):
    right(name)(getattr(pipeline, name))


# gpipe


@right("gpipe")
def flush_by_time_slots(num_stages, num_microbatches):
    out = [[] for _ in range(num_stages)]
    for slot in range(num_stages + num_microbatches - 1):
        for s in range(num_stages):
            if 0 <= slot - s < num_microbatches:
                out[s].append(("F", slot - s, 0))
    for stage in out:
        stage.extend([("B", i, 0) for _, i, _ in list(stage)])
    return out


@wrong("gpipe", says="operations|stages")
def one_stage_only(num_stages, num_microbatches):
    return schedules.gpipe(1, num_microbatches)


@wrong("gpipe", says="FB|forwards")
def backward_at_once(num_stages, num_microbatches):
    return [[(k, i, 0) for i in range(num_microbatches) for k in "FB"] for _ in range(num_stages)]


@wrong("gpipe", says="FB|forwards")
def really_1f1b(num_stages, num_microbatches):
    return schedules.one_f_one_b(num_stages, num_microbatches)


@wrong("gpipe", says="operations")
def forgets_the_last(num_stages, num_microbatches):
    return [stage[:-1] for stage in schedules.gpipe(num_stages, num_microbatches)]


@wrong("gpipe", says="deadlock|time")
def every_other_stage_reversed(num_stages, num_microbatches):
    out = schedules.gpipe(num_stages, num_microbatches)
    return [
        s if n % 2 else s[:num_microbatches] + s[num_microbatches:][::-1] for n, s in enumerate(out)
    ]


@wrong("gpipe", says="operations")
def chunk_is_the_stage(num_stages, num_microbatches):
    out = schedules.gpipe(num_stages, num_microbatches)
    return [[(k, i, s) for k, i, _ in stage] for s, stage in enumerate(out)]


# one_f_one_b


@right("one_f_one_b")
def by_counting_down(num_stages, num_microbatches):
    out = []
    for s in range(num_stages):
        f = b = 0
        ops = []
        while b < num_microbatches:
            if f < num_microbatches and f - b < num_stages - s:
                ops.append(("F", f, 0))
                f += 1
            else:
                ops.append(("B", b, 0))
                b += 1
        out.append(ops)
    return out


@wrong("one_f_one_b", says="live")
def really_gpipe(num_stages, num_microbatches):
    return schedules.gpipe(num_stages, num_microbatches)


@wrong("one_f_one_b", says="live")
def one_forward_too_many(num_stages, num_microbatches):
    return [
        schedules._alternate(
            [("F", i, 0) for i in range(num_microbatches)],
            [("B", i, 0) for i in range(num_microbatches)],
            min(num_stages - s, num_microbatches),
        )
        for s in range(num_stages)
    ]


@wrong("one_f_one_b", says="deadlock|live")
def no_warm_up(num_stages, num_microbatches):
    pairs = [(k, i, 0) for i in range(num_microbatches) for k in "FB"]
    return [list(pairs) for _ in range(num_stages)]


@wrong("one_f_one_b", says="live|deadlock")
def warm_up_of_the_mirror_stage(num_stages, num_microbatches):
    return schedules.one_f_one_b(num_stages, num_microbatches)[::-1]


@wrong("one_f_one_b", says="operations")
def drops_the_tail(num_stages, num_microbatches):
    out = []
    for s, stage in enumerate(schedules.one_f_one_b(num_stages, num_microbatches)):
        out.append(stage[: len(stage) - (num_stages - s - 1)])
    return out


@wrong("one_f_one_b", says="operations")
def fails_with_few_microbatches(num_stages, num_microbatches):
    out = []
    for s in range(num_stages):
        warm = num_stages - s - 1
        ops = [("F", i, 0) for i in range(warm)]
        for i in range(num_microbatches - warm):
            ops += [("F", warm + i, 0), ("B", i, 0)]
        ops += [("B", i, 0) for i in range(num_microbatches - warm, num_microbatches)]
        out.append(ops)
    return out


# interleaved


@right("interleaved")
def by_group_lists(num_stages, num_microbatches, num_chunks):
    p, m, v = num_stages, num_microbatches, num_chunks
    if m % p:
        raise ValueError("micro-batches must come in groups of the number of stages")
    groups = [range(g, g + p) for g in range(0, m, p)]
    forwards = [("F", i, c) for g in groups for c in range(v) for i in g]
    backwards = [("B", i, c) for g in groups for c in reversed(range(v)) for i in g]
    out = []
    for s in range(p):
        lead, f, b, ops = 2 * (p - s - 1) + (v - 1) * p, 0, 0, []
        while b < m * v:
            if f < m * v and f - b <= lead:
                ops.append(forwards[f])
                f += 1
            else:
                ops.append(backwards[b])
                b += 1
        out.append(ops)
    return out


@wrong("interleaved", says="live|time|deadlock")
def all_microbatches_a_chunk(num_stages, num_microbatches, num_chunks):
    p, m, v = num_stages, num_microbatches, num_chunks
    if m % p:
        raise ValueError("micro-batches must come in groups of the number of stages")
    forwards = [("F", i, c) for c in range(v) for i in range(m)]
    backwards = [("B", i, c) for c in reversed(range(v)) for i in range(m)]
    return [forwards + backwards for _ in range(p)]


@wrong("interleaved", says="deadlock|live")
def backward_chunks_in_forward_order(num_stages, num_microbatches, num_chunks):
    out = schedules.interleaved(num_stages, num_microbatches, num_chunks)
    last = num_chunks - 1
    return [[(k, i, last - c if k == "B" else c) for k, i, c in stage] for stage in out]


@wrong("interleaved", says="accepted|expected ValueError")
def any_number_of_microbatches(num_stages, num_microbatches, num_chunks):
    if num_microbatches % num_stages:
        return [[("F", 0, 0), ("B", 0, 0)]] * num_stages
    return schedules.interleaved(num_stages, num_microbatches, num_chunks)


@wrong("interleaved", says="operations")
def forgets_the_chunks(num_stages, num_microbatches, num_chunks):
    if num_microbatches % num_stages:
        raise ValueError("micro-batches must come in groups of the number of stages")
    return schedules.one_f_one_b(num_stages, num_microbatches)


@wrong("interleaved", says="live|deadlock")
def warms_up_like_1f1b(num_stages, num_microbatches, num_chunks):
    p, m, v = num_stages, num_microbatches, num_chunks
    full = schedules.interleaved(p, m, v)
    out = []
    for s, stage in enumerate(full):
        f = [op for op in stage if op[0] == "F"]
        b = [op for op in stage if op[0] == "B"]
        out.append(schedules._alternate(f, b, min(p - s - 1, m * v)))
    return out


# simulate


@right("simulate")
def simulated_backwards_from_needs(schedule, forward=1.0, backward=2.0, send=0.0):
    return schedules.simulate([list(map(tuple, s)) for s in schedule], forward, backward, send)


def _simulated(**changes):
    def answer(schedule, forward=1.0, backward=2.0, send=0.0):
        result = schedules.simulate(schedule, forward, backward, send)
        return result | {k: f(result, schedule) for k, f in changes.items()}

    return answer


def _named(name, answer):
    answer.__name__ = name
    return answer


wrong("simulate", says="bubble")(
    _named(
        "bubble_over_busy_time",
        _simulated(bubble=lambda r, s: r["bubble"] / (1 - r["bubble"]) if r["bubble"] < 1 else 1),
    )
)
wrong("simulate", says="peak_live")(
    _named("peak_is_all", _simulated(peak_live=lambda r, s: [len(x) // 2 for x in s]))
)


@wrong("simulate", says="makespan")
def no_waiting(schedule, forward=1.0, backward=2.0, send=0.0):
    result = schedules.simulate(schedule, forward, backward, 0.0)
    return result | {"makespan": max(len(s) for s in schedule) / 2 * (forward + backward)}


@wrong("simulate", says="makespan|runs")
def sending_is_free(schedule, forward=1.0, backward=2.0, send=0.0):
    return schedules.simulate(schedule, forward, backward, 0.0)


@wrong("simulate", says="makespan|runs")
def backward_costs_one(schedule, forward=1.0, backward=2.0, send=0.0):
    return schedules.simulate(schedule, forward, forward, send)


@wrong("simulate", says="accepted|expected ValueError|raised")
def hides_deadlocks(schedule, forward=1.0, backward=2.0, send=0.0):
    try:
        return schedules.simulate(schedule, forward, backward, send)
    except ValueError:
        return {"makespan": float("inf"), "bubble": 1.0, "peak_live": [], "timeline": []}


@wrong("simulate", says="makespan|runs")
def pays_for_messages_to_itself(schedule, forward=1.0, backward=2.0, send=0.0):
    if len(schedule) > 1:
        return schedules.simulate(schedule, forward, backward, send)
    return schedules.simulate(schedule, forward + send, backward, 0.0)


@wrong("simulate", says="makespan|runs")
def chunks_of_one_rank_send_too(schedule, forward=1.0, backward=2.0, send=0.0):
    if len(schedule) > 1:
        return schedules.simulate(schedule, forward, backward, send)
    result, late = schedules.simulate(schedule, forward, backward), 0.0
    line = []
    for s, kind, i, chunk, start, end in result["timeline"]:
        late += send if chunk != (0 if kind == "F" else schedules._complete(schedule) - 1) else 0.0
        line.append((s, kind, i, chunk, start + late, end + late))
    return result | {"timeline": line, "makespan": line[-1][-1]}


@wrong("simulate", says="every stage misses")
def compares_stages_with_each_other(schedule, forward=1.0, backward=2.0, send=0.0):
    if any(len(set(stage)) < len(stage) or {*stage} != {*schedule[0]} for stage in schedule):
        raise ValueError("stages do different work")
    schedule = [list(stage) for stage in schedule]
    for stage in schedule:  # plays what is there
        have = {("B", i, c) for k, i, c in stage if k == "F"}
        stage += sorted(have - set(stage))
    return schedules.simulate(schedule, forward, backward, send)


@wrong("simulate", says="changed the schedule")
def takes_operations_out(schedule, forward=1.0, backward=2.0, send=0.0):
    result = schedules.simulate(schedule, forward, backward, send)
    for stage in schedule:
        while stage:
            stage.pop(0)
    return result


# bubble_fraction


@right("bubble_fraction")
def from_the_simulator(num_stages, num_microbatches, num_chunks=1):
    busy = num_microbatches * num_chunks
    return 1 - busy / (busy + num_stages - 1)


@wrong("bubble_fraction", says="bubble of")
def over_busy_slots(num_stages, num_microbatches, num_chunks=1):
    return (num_stages - 1) / (num_chunks * num_microbatches)


@wrong("bubble_fraction", says="bubble of")
def off_by_one_stage(num_stages, num_microbatches, num_chunks=1):
    return num_stages / (num_chunks * num_microbatches + num_stages)


@wrong("bubble_fraction", says="chunks")
def without_chunks(num_stages, num_microbatches, num_chunks=1):
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


@wrong("bubble_fraction", says="bubble of")
def in_percent(num_stages, num_microbatches, num_chunks=1):
    return 100 * schedules.bubble_fraction(num_stages, num_microbatches, num_chunks)


@wrong("bubble_fraction", says="bubble of")
def chunks_divide_the_whole(num_stages, num_microbatches, num_chunks=1):
    return schedules.bubble_fraction(num_stages, num_microbatches) / num_chunks


# run_pipeline


@right("run_pipeline")
def one_list_a_direction(stage, schedule, microbatches, targets, loss_fn, group=None):
    """Receives everything a neighbour has sent so far in its own order, into lists."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    m = sum(op[0] == "F" for op in schedule[rank])
    xs, ys, gs = [None] * m, [None] * m, [None] * m
    order_x = [i for k, i, _ in schedule[rank - 1] if k == "F"] if rank else []
    order_g = [i for k, i, _ in schedule[rank + 1] if k == "B"] if rank < last else []
    sent, losses = [], []
    for kind, i, _ in schedule[rank]:
        if kind == "F":
            while rank and xs[i] is None:
                xs[order_x.pop(0)] = recv_activation(rank - 1, group)
            xs[i] = microbatches[i] if rank == 0 else xs[i]
            ys[i] = stage(xs[i])
            if rank < last:
                send_activation(ys[i].detach(), rank + 1, group, sent)
            continue
        while rank < last and gs[i] is None:
            j = order_g.pop(0)
            gs[j] = recv(room(ys[j]), rank + 1, group)
        if rank == last:
            loss = loss_fn(ys[i], targets[i])
            loss.backward(torch.full_like(loss, 1 / m))
            losses.append(loss.detach())
            del loss
        else:
            ys[i].backward(gs[i])
        if rank > 0:
            send(xs[i].grad, rank - 1, group, sent)
        xs[i] = ys[i] = None
    for work, _ in sent:
        work.wait()
    return sum(losses) / m if rank == last else None


def _variant(
    scale=None,
    wipe=False,
    order=None,
    loss_everywhere=False,
    room=room,
    load=lambda x: x,
    send=send_activation,
    receive=recv_activation,
    keep=None,
    send_back=send,
    receive_back=None,
    tidy=True,
):
    if receive_back is None:

        def receive_back(y, peer, group):
            return recv(room(y), peer, group)

    def answer(stage, schedule, microbatches, targets, loss_fn, group=None):
        rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
        m = sum(op[0] == "F" for op in schedule[rank])
        where = next(stage.parameters()).device  # for the loss
        if wipe:
            stage.zero_grad()
        live, sent, losses = {}, [], []
        schedule = [order(ops) for ops in schedule] if order else schedule
        inputs = pipeline.Inbox(schedule, rank - 1, "F", lambda i: receive(rank - 1, group))
        back = pipeline.Inbox(
            schedule, rank + 1, "B", lambda i: receive_back(live[i][1], rank + 1, group)
        )
        for kind, i, _ in schedule[rank]:
            if kind == "F":
                x = load(microbatches[i]) if rank == 0 else inputs.take(i)
                y = stage(x)
                if rank == last:
                    y = loss_fn(y, targets[i]) / (scale or m)
                    losses.append(y.detach() if tidy else y)
                else:
                    send(y.detach(), rank + 1, group, sent)
                live[i] = x, y
            else:
                grad = None if rank == last else back.take(i)
                x, y = live.pop(i)
                y.backward(grad)
                if rank > 0:
                    send_back(x.grad, rank - 1, group, sent)
            if tidy:
                del x, y
        for work, _ in sent:
            work.wait()
        if keep is not None:
            keep.append((microbatches, targets, sent))
        total = torch.stack(losses).sum().detach() if losses else None
        if loss_everywhere:
            total = torch.zeros((), device=where) if total is None else total
            dist.all_reduce(total, group=group)
        return total

    return answer


@wrong("run_pipeline", says="the caller's")
def every_input_requires_a_gradient(stage, schedule, microbatches, targets, loss_fn, group=None):
    for x in microbatches or []:
        x.requires_grad_()
    return pipeline.run_pipeline(stage, schedule, microbatches, targets, loss_fn, group)


@wrong("run_pipeline", says="a frozen parameter of stage.*has a gradient")
def trains_what_was_frozen(stage, schedule, microbatches, targets, loss_fn, group=None):
    stage.requires_grad_(True)
    return pipeline.run_pipeline(stage, schedule, microbatches, targets, loss_fn, group)


wrong("run_pipeline", says="off by|loss")(_named("sums_the_microbatches", _variant(scale=1)))
wrong("run_pipeline", says="contiguous")(
    _named("receives_into_the_same_strides", _variant(room=torch.empty_like))
)
wrong("run_pipeline", says="off by")(_named("always_five_microbatches", _variant(scale=5)))
wrong("run_pipeline", says="tokens|token ids")(
    _named("a_copy_that_requires_a_gradient", _variant(load=lambda x: x.clone().requires_grad_()))
)
wrong("run_pipeline", says="bytes after the step")(_named("keeps_what_was_sent", _variant(keep=[])))
wrong("run_pipeline", says="gradient")(_named("wipes_earlier_gradients", _variant(wipe=True)))


def _send_in_three(y, peer, group, sent):
    """Number of dimensions and dtype, sizes, and the activation: a message each."""
    kind = pipeline._DTYPES.index(y.dtype)
    send(torch.tensor([y.dim(), kind], device=y.device), peer, group, sent)
    send(torch.tensor(y.shape, device=y.device), peer, group, sent)
    send(y, peer, group, sent)


def _recv_in_three(peer, group, dtype=None):
    def ints(n):
        return recv(torch.empty(n, dtype=torch.int64, device=device()), peer, group).tolist()

    dims, kind = ints(2)
    x = torch.empty(ints(dims), dtype=dtype or pipeline._DTYPES[kind], device=device())
    return recv(x, peer, group).requires_grad_()


def _send_known_dtypes(y, peer, group, sent):
    if y.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"no number stands for {y.dtype}")
    send_activation(y, peer, group, sent)


wrong("run_pipeline", says="float64 activations.*no number stands for torch.float64")(
    _named("two_dtypes_only", _variant(send=_send_known_dtypes))
)
right("run_pipeline")(
    _named("header_in_two_parts", _variant(send=_send_in_three, receive=_recv_in_three))
)
wrong("run_pipeline", says="bf16")(
    _named(
        "receives_fp32_only",
        _variant(
            send=_send_in_three,
            receive=lambda peer, group: _recv_in_three(peer, group, torch.float32),
        ),
    )
)


right("run_pipeline")(
    _named(
        "a_header_before_each_message_either_way",
        _variant(
            send_back=send_activation,
            receive_back=lambda y, peer, group: recv_activation(peer, group).detach(),
        ),
    )
)
right("run_pipeline")(_named("locals_of_the_last_backward_until_it_returns", _variant(tidy=False)))


def _recv_three_dimensions(peer, group):
    x = recv_activation(peer, group)
    assert x.dim() == 3, "activations are [b, s, h]"
    return x


wrong("run_pipeline", says="two-dimensional")(
    _named("three_dimensions_only", _variant(receive=_recv_three_dimensions))
)


@wrong("run_pipeline", says="forwards for")
def every_forward_twice(stage, schedule, microbatches, targets, loss_fn, group=None):
    """Once to learn the shape, once for the value."""
    inner = stage.forward
    stage.forward = lambda x: (inner(x), inner(x))[1]
    return pipeline.run_pipeline(stage, schedule, microbatches, targets, loss_fn, group)


@wrong("run_pipeline", says="held|holds")
def keeps_every_graph(stage, schedule, microbatches, targets, loss_fn, group=None):
    stage.kept = []
    stage.register_forward_hook(lambda module, args, out: stage.kept.append(out))
    return pipeline.run_pipeline(stage, schedule, microbatches, targets, loss_fn, group)


@wrong("run_pipeline", says="outputs, expected")
def keeps_every_output(stage, schedule, microbatches, targets, loss_fn, group=None):
    """Backward frees each graph, but what the stage gave stays until the step is over."""
    kept = []
    hook = stage.register_forward_hook(lambda module, args, out: kept.append(out))
    loss = pipeline.run_pipeline(stage, schedule, microbatches, targets, loss_fn, group)
    hook.remove()
    return loss


wrong("run_pipeline", says="only the last")(
    _named("loss_on_every_rank", _variant(loss_everywhere=True))
)
wrong("run_pipeline", says="held|expected")(
    _named("always_gpipe", _variant(order=lambda ops: sorted(ops, key=lambda o: (o[0] == "B", o))))
)


@wrong("run_pipeline", says="only the last|sent|gradient")
def whole_model_everywhere(stage, schedule, microbatches, targets, loss_fn, group=None):
    """No pipeline at all: each stage trains on noise of its own."""
    for p in stage.parameters():
        p.grad.add_(torch.randn_like(p))
    return None if dist.get_rank(group) != dist.get_world_size(group) - 1 else torch.zeros(())


@wrong("run_pipeline", says="waiting|deadlock|hang|hung|never|rank|gradient|off by")
def forgets_the_gradient_of_the_input(stage, schedule, microbatches, targets, loss_fn, group=None):
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    m = sum(op[0] == "F" for op in schedule[rank])
    live, sent, losses = {}, [], []
    for kind, i, _ in schedule[rank]:
        if kind == "F":
            x = microbatches[i] if rank == 0 else recv_activation(rank - 1, group)
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[i]) / m
                losses.append(y.detach())
            else:
                send_activation(y.detach(), rank + 1, group, sent)
            live[i] = x, y
        else:
            x, y = live.pop(i)
            grad = None if rank == last else recv(room(y), rank + 1, group)
            y.backward(grad)
            if rank > 0:
                send(x.detach(), rank - 1, group, sent)  # the activation, not its gradient
    for work, _ in sent:
        work.wait()
    return torch.stack(losses).sum() if rank == last else None


# sync_tied_embeddings_


@right("sync_tied_embeddings_")
def through_a_group_of_two(first_weight, last_weight, group=None):
    _swapped(first_weight, last_weight, group)


def _swapped(
    first_weight, last_weight, group, copies=True, dense=torch.Tensor.contiguous, dtype=None
):
    if first_weight is last_weight:
        return
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    w = first_weight if first_weight is not None else last_weight
    if first_weight is not None and last_weight is not None:
        if copies:
            w.grad = w.grad + last_weight.grad
            last_weight.grad = w.grad.clone()
        return
    if w.grad is None:
        w.grad = torch.zeros_like(w)
    peer = world - 1 if rank == 0 else 0
    mine = dense(w.grad)
    other = torch.empty_like(mine, dtype=dtype)
    work = dist.isend(mine, group=group, group_dst=peer)
    dist.recv(other, group=group, group_src=peer)
    work.wait()
    w.grad = mine + other


@wrong("sync_tied_embeddings_", says="two objects hold a gradient each")
def forgets_two_copies_on_one_rank(first_weight, last_weight, group=None):
    _swapped(first_weight, last_weight, group, copies=False)


@wrong("sync_tied_embeddings_", says="two Parameters in the same memory.*off by")
def told_apart_by_data_ptr(first_weight, last_weight, group=None):
    both = first_weight is not None and last_weight is not None
    if not both or first_weight.data_ptr() != last_weight.data_ptr():
        _swapped(first_weight, last_weight, group)


@wrong("sync_tied_embeddings_", says="changes the other's.*(?s:.*)clone the sum")
def one_tensor_as_both_gradients(first_weight, last_weight, group=None):
    _swapped(first_weight, last_weight, group)
    if first_weight is not None and last_weight is not None and first_weight is not last_weight:
        last_weight.grad = first_weight.grad


@wrong("sync_tied_embeddings_", says="must be contiguous")
def views_a_strided_gradient(first_weight, last_weight, group=None):
    _swapped(first_weight, last_weight, group, dense=lambda g: g.view(-1).view(g.shape))


@wrong("sync_tied_embeddings_", says="in bf16")
def receives_fp32(first_weight, last_weight, group=None):
    _swapped(first_weight, last_weight, group, dtype=torch.float32)


@wrong("sync_tied_embeddings_", says="off by")
def does_nothing(first_weight, last_weight, group=None):
    pass


@wrong("sync_tied_embeddings_", says="bytes of gradients")
def all_reduces_over_the_pipeline(first_weight, last_weight, group=None):
    if first_weight is not None and last_weight is not None:
        return _swapped(first_weight, last_weight, group)
    w = first_weight if first_weight is not None else last_weight
    where = w.device if w is not None else None
    if where is None:
        from shardbook.devices import device

        where = device()
    grad = (
        torch.zeros(11, 6, device=where)
        if w is None or w.grad is None
        else w.grad.contiguous().clone()
    )
    dist.all_reduce(grad, group=group)
    if w is not None:
        w.grad = grad


@wrong("sync_tied_embeddings_", says="off by")
def takes_the_mean(first_weight, last_weight, group=None):
    through_a_group_of_two(first_weight, last_weight, group)
    w = first_weight if first_weight is not None else last_weight
    if w is not None and first_weight is not last_weight:
        w.grad = w.grad / 2


@wrong("sync_tied_embeddings_", says="changed the weight|off by")
def syncs_the_weights(first_weight, last_weight, group=None):
    if first_weight is last_weight:
        return
    w = first_weight if first_weight is not None else last_weight
    with torch.no_grad():
        w.add_(w)
        w.grad = w.grad + w


@wrong("sync_tied_embeddings_", says="off by|one Parameter")
def doubles_on_one_rank(first_weight, last_weight, group=None):
    if first_weight is not None and first_weight is last_weight:
        first_weight.grad = first_weight.grad * 2
        return
    through_a_group_of_two(first_weight, last_weight, group)


@wrong("sync_tied_embeddings_", says="off by")
def only_the_last_gets_it(first_weight, last_weight, group=None):
    mine = None if first_weight is None or first_weight.grad is None else first_weight.grad.clone()
    through_a_group_of_two(first_weight, last_weight, group)
    if first_weight is not None and mine is not None:
        first_weight.grad = mine


@wrong("sync_tied_embeddings_", says="rank|group|raised|never")
def global_ranks(first_weight, last_weight, group=None):
    if first_weight is not None and first_weight is last_weight:
        return
    w = first_weight if first_weight is not None else last_weight
    if w is None:
        return
    if w.grad is None:
        w.grad = torch.zeros_like(w)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    peer = world - 1 if rank == 0 else 0  # a rank of the group, used as a global one
    other = torch.empty_like(w.grad)
    work = dist.isend(w.grad.contiguous(), dst=peer, group=group)
    dist.recv(other, src=peer, group=group)
    work.wait()
    w.grad = w.grad + other
