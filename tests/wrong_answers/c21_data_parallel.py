"""Answers to chapter 21: mistakes engineers make with data parallel and ZeRO, and right ones."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardbook.parallel import data, zero
from shardbook.parallel.flat import all_gather_flat, flatten_padded, reduce_scatter_mean
from tests.wrong_answers import right, wrong

for name in ("average_gradients_", "BucketedDataParallel"):
    right(name)(getattr(data, name))
for name in ("ZeroAdamW", "FullySharded", "clip_grad_norm_sharded_", "training_memory"):
    right(name)(getattr(zero, name))


def variant(base, **changes):
    """The reference with some methods replaced."""
    return type(changes.pop("name", base.__name__), (base,), changes)


# average_gradients_


@right("average_gradients_")
def averaged_through_one_message(model, group=None):
    world = dist.get_world_size(group)
    params = list(model.parameters())
    device = params[0].device
    has = torch.tensor([0.0 if p.grad is None else 1.0 for p in params]).to(device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    mine = [p for p, h in zip(params, has.tolist(), strict=True) if h]
    for dtype in sorted({p.dtype for p in mine}, key=str):
        some = [p for p in mine if p.dtype == dtype]
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in some]
        )
        dist.all_reduce(flat.div_(world), group=group)
        for p in some:
            p.grad = flat[: p.numel()].view(p.shape).clone()
            flat = flat[p.numel() :]


def _flags_as_objects(model, group):
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, [p.grad is not None for p in model.parameters()], group=group)
    return [any(has) for has in zip(*every, strict=True)]


def _flat_averages(model, group, used, limit=None):
    mine = [p for p, has in zip(model.parameters(), used, strict=True) if has]
    for p in mine:
        p.grad = data.gradient_or_zeros(p)
    for some in data.by_dtype(mine):
        flat = torch.cat([p.grad.flatten() for p in some])
        piece = flat[: limit and limit // flat.element_size()]
        dist.all_reduce(piece, group=group)
        piece /= dist.get_world_size(group)
        for p, mean in zip(some, flat.split([p.numel() for p in some]), strict=True):
            p.grad = mean.view(p.shape).clone()


@right("average_gradients_")
def asks_for_flags_as_objects(model, group=None):
    _flat_averages(model, group, _flags_as_objects(model, group))


@wrong("average_gradients_", says="every piece is reduced")
def averages_the_first_25_megabytes(model, group=None):
    _flat_averages(model, group, _flags_as_objects(model, group), 25_000_000)


@wrong("average_gradients_", says="stays None")
def asks_for_flags_once(model, group=None):
    if not hasattr(model, "used"):
        model.used = _flags_as_objects(model, group)
    _flat_averages(model, group, model.used)


@wrong("average_gradients_", says="bytes behind")
def keeps_every_gradient(model, group=None):
    data.average_gradients_(model, group)
    model.__dict__.setdefault("log", []).append([p.grad for p in model.parameters()])


@wrong("average_gradients_", says="never communicated|off by")
def average_nothing(model, group=None):
    pass


def _each(model, group, divide, missing_too=True):
    for p in model.parameters():
        if p.grad is None and missing_too:
            continue
        flat = p.grad.contiguous()
        dist.all_reduce(flat, group=group)
        p.grad = divide(flat, group)


@wrong("average_gradients_", says="divide by the number of ranks")
def sum_of_gradients(model, group=None):
    _each(model, group, lambda g, group: g)


@wrong("average_gradients_", says="at most 2 and one small")
def a_message_per_parameter(model, group=None):
    _each(model, group, lambda g, group: g / dist.get_world_size(group))


@wrong("average_gradients_", says="divide by the number of ranks, once")
def divided_twice(model, group=None):
    data.average_gradients_(model, group)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size(group)


@wrong("average_gradients_", says="size of that group|still running|4 ranks|2 ranks")
def divided_by_the_whole_world(model, group=None):
    data.average_gradients_(model, group)
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= dist.get_world_size(group) / dist.get_world_size()


@wrong("average_gradients_", says="expected None")
def zeros_for_what_nobody_used(model, group=None):
    for p in model.parameters():
        p.grad = data.gradient_or_zeros(p)
    data.average_gradients_(model, group)


@wrong("average_gradients_", says="counts as zero")
def mean_over_the_ranks_that_have_one(model, group=None):
    params = list(model.parameters())
    counts = torch.tensor([int(p.grad is not None) for p in params]).to(params[0].device)
    dist.all_reduce(counts, group=group)
    used = [(p, n) for p, n in zip(params, counts.tolist(), strict=True) if n]
    for dtype in sorted({p.dtype for p, _ in used}, key=str):
        some = [x for x in used if x[0].dtype == dtype]
        flat = torch.cat([data.gradient_or_zeros(p).flatten() for p, _ in some])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([p.numel() for p, _ in some])
        for (p, n), piece in zip(some, pieces, strict=True):
            p.grad = piece.view(p.shape) / n


@wrong("average_gradients_", says="dtypes|is torch.bfloat16|off by|bytes")
def everything_as_bf16(model, group=None):
    used = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten().bfloat16() for p in used])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for p, piece in zip(used, flat.split([p.numel() for p in used]), strict=True):
        p.grad = piece.view(p.shape).to(p.dtype)


@wrong("average_gradients_", says="collective calls|parameter 'm")
def averages_the_parameters(model, group=None):
    for p in model.parameters():
        whole = p.detach().contiguous()
        dist.all_reduce(whole, group=group)
        p.detach().copy_(whole / dist.get_world_size(group))
    data.average_gradients_(model, group)


@wrong("average_gradients_", says="off by")
def only_the_first_ranks_gradients(model, group=None):
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.contiguous()
            dist.broadcast(p.grad, group=group, group_src=0)


@wrong("average_gradients_", says="half of float64's digits")
def everything_as_fp32(model, group=None):
    """One message for all dtypes."""
    used = [
        p
        for p, has in zip(
            model.parameters(), data.has_gradient(list(model.parameters()), group), strict=True
        )
        if has
    ]
    if not used:
        return
    flat = torch.cat([data.gradient_or_zeros(p).flatten().float() for p in used])
    for piece in flat.split(6_000_000):
        dist.all_reduce(piece, group=group)
    flat /= dist.get_world_size(group)
    for p, piece in zip(used, flat.split([p.numel() for p in used]), strict=True):
        p.grad = piece.view(p.shape).to(p.dtype, copy=True)


@wrong("average_gradients_", says="frozen")
def zeros_for_frozen_parameters(model, group=None):
    data.average_gradients_(model, group)
    for p in model.parameters():
        if not p.requires_grad:
            p.grad = torch.zeros_like(p)


# BucketedDataParallel

Bucketed = data.BucketedDataParallel


@right("BucketedDataParallel")
class OnTopOfTorch(nn.Module):
    """Torch's own reducer does the work; it needs to look for unused parameters."""

    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        super().__init__()
        self.inner = DistributedDataParallel(
            module,
            process_group=group or dist.group.WORLD,
            bucket_cap_mb=bucket_bytes / 2**20,
            find_unused_parameters=True,
        )

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def finish(self):
        pass

    def no_sync(self):
        return self.inner.no_sync()


@right("BucketedDataParallel")
class FuturesInALayout(nn.Module):
    """Buckets laid out by index and divided before they leave; waits through futures."""

    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        super().__init__()
        self.module, self.group, self.quiet = module, group, False
        with torch.no_grad():
            for t in list(module.parameters()) + list(module.buffers()):
                dist.broadcast(
                    t, src=dist.get_global_rank(group or dist.group.WORLD, 0), group=group
                )
        self.buckets, size = [[]], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if self.buckets[-1] and size + p.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.nbytes
            p.register_post_accumulate_grad_hook(self.ready)
        self.reset()

    def reset(self):
        self.left = [len(b) for b in self.buckets]
        self.sent = []

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def ready(self, p):
        if self.quiet:
            return
        for i, bucket in enumerate(self.buckets):
            self.left[i] -= any(q is p for q in bucket)
        while len(self.sent) < len(self.left) and self.left[len(self.sent)] == 0:
            self.send()

    def send(self):
        bucket = self.buckets[len(self.sent)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.reshape(-1) for g in grads]) / dist.get_world_size(self.group)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.sent.append((flat, work.get_future()))

    def finish(self):
        while len(self.sent) < len(self.buckets):
            self.send()
        for bucket, (flat, future) in zip(self.buckets, self.sent, strict=True):
            future.wait()
            at = 0
            for p in bucket:
                p.grad = flat[at : at + p.numel()].view_as(p).clone()
                at += p.numel()
        self.reset()

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False


@wrong("BucketedDataParallel", says="step|gradient")
class NoAverage(Bucketed):
    def gradient_arrived(self, param):
        pass

    def finish(self):
        pass


@wrong("BucketedDataParallel", says="first")
class NoBroadcast(Bucketed):
    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        kept = {k: v.clone() for k, v in module.state_dict().items()}
        super().__init__(module, bucket_bytes, group)
        module.load_state_dict(kept)


@wrong("BucketedDataParallel", says="buffer")
class BuffersForgotten(Bucketed):
    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        kept = {k: v.clone() for k, v in module.named_buffers()}
        super().__init__(module, bucket_bytes, group)
        for k, v in module.named_buffers():
            v.copy_(kept[k])


@wrong("BucketedDataParallel", says="before the backward pass had finished")
class AllInFinish(Bucketed):
    """Right gradients, nothing overlapped: what a naive test of DDP lets pass."""

    def gradient_arrived(self, param):
        pass


@wrong("BucketedDataParallel", says="last layers")
class FirstLayersFirst(Bucketed):
    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        super().__init__(module, bucket_bytes, group)
        self.buckets = data.make_buckets(list(module.parameters()), bucket_bytes)
        self.bucket_of = {p: b for b in self.buckets for p in b.params}


@wrong("BucketedDataParallel", says="async_op")
class WaitsInBackward(Bucketed):
    def start(self, bucket):
        super().start(bucket)
        bucket.work.wait()


@wrong("BucketedDataParallel", says="messages for")
class AMessageAParameter(Bucketed):
    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        super().__init__(module, 1, group)


@wrong("BucketedDataParallel", says="one message has")
class OneBucket(Bucketed):
    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        super().__init__(module, 10**9, group)


@wrong("BucketedDataParallel", says="whole batch|number of ranks")
class SumsOnly(Bucketed):
    def finish(self):
        super().finish()
        for p in self.bucket_of:
            if p.grad is not None:
                p.grad *= dist.get_world_size(self.group)


@wrong("BucketedDataParallel", says="under no_sync")
class SyncsAlways(Bucketed):
    """Every micro-batch is averaged: right in the end, and paid for three times."""

    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.finish()


@wrong("BucketedDataParallel", says="finally")
class NoSyncStaysAfterAnError(Bucketed):
    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True


@wrong("BucketedDataParallel", says="no longer sends")
class NoSyncForgetsToSyncAgain(Bucketed):
    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield


@wrong("BucketedDataParallel", says="accumulated gradient")
class SendsTheLastMicroBatchOnly(Bucketed):
    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for p in self.bucket_of:
            p.grad = None


@wrong("BucketedDataParallel", says="did not use|own order|still|never")
class StartsBucketsAsTheyFill(Bucketed):
    """Ranks that run other branches send their buckets in another order, and add up apples."""

    def gradient_arrived(self, param):
        if self.syncing:
            bucket = self.bucket_of[param]
            bucket.missing.discard(param)
            if not bucket.missing:
                self.start(bucket)

    def finish(self):
        for bucket in self.buckets:
            if bucket.work is None:
                self.start(bucket)
        self.started = len(self.buckets)
        super().finish()


@wrong("BucketedDataParallel", says="ready for the next backward")
class ForgetsToReset(Bucketed):
    def finish(self):
        super().finish()
        self.started = len(self.buckets)
        for bucket in self.buckets:
            bucket.missing = set()

    def gradient_arrived(self, param):
        if self.started < len(self.buckets):
            super().gradient_arrived(param)


@wrong("BucketedDataParallel", says="broadcast all parameters")
class BroadcastsWhatIsTrained(Bucketed):
    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        kept = {n: p.clone() for n, p in module.named_parameters() if not p.requires_grad}
        super().__init__(module, bucket_bytes, group)
        module.load_state_dict(kept, strict=False)


@wrong("BucketedDataParallel", says="requires_grad into buckets")
class HooksEveryParameter(Bucketed):
    """A hook on a frozen parameter raises."""

    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        super().__init__(module, bucket_bytes, group)
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)


@wrong("BucketedDataParallel", says="stay frozen")
class ThawsEverything(Bucketed):
    def __init__(self, module, bucket_bytes=25_000_000, group=None):
        super().__init__(module.requires_grad_(), bucket_bytes, group)


@wrong("BucketedDataParallel", says="the 3 micro-batches again")
class DividesByTheMicroBatches(Bucketed):
    quiet = 0

    @contextlib.contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.quiet = 2

    def finish(self):
        super().finish()
        for p in self.bucket_of:
            if p.grad is not None:
                p.grad /= 1 + self.quiet
        self.quiet = 0


# ZeroAdamW

Zero = zero.ZeroAdamW


class PerParameter(torch.optim.Optimizer):
    """Whole parameters to ranks, greedily; all-reduce, torch's AdamW on mine, broadcast."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, group=None):
        self.group = group
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        world, every = dist.get_world_size(group), []
        for g in self.param_groups:
            every += g["params"]
        load, self.owner = [0] * world, {}
        for p in sorted(every, key=lambda p: -p.numel()):
            self.owner[p] = load.index(min(load))
            load[self.owner[p]] += p.numel()
        self.mine = [p for p in every if self.owner[p] == dist.get_rank(group)]
        self.inner = {
            p: torch.optim.AdamW([p], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
            for p in self.mine
        }

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        kept = []
        for g in self.param_groups:
            used = data.has_gradient(g["params"], self.group)
            for p, has in zip(g["params"], used, strict=True):
                if not has:
                    continue
                before, grad = p.grad, data.gradient_or_zeros(p).contiguous().clone()
                dist.all_reduce(grad, group=self.group)
                p.grad = grad.view_as(p) / dist.get_world_size(self.group)
                if p in self.inner:
                    options = self.inner[p].param_groups[0]
                    options.update({k: v for k, v in g.items() if k != "params"})
                    self.inner[p].state[p] = self.state[p]  # so that state_dict() has it
                    self.inner[p].step()
                whole = p.detach().contiguous()
                dist.broadcast(whole, group=self.group, group_src=self.owner[p])
                p.copy_(whole)
                kept.append((p, before))
        for p, before in kept:
            p.grad = before
        return loss


right("ZeroAdamW")(PerParameter)


@wrong("ZeroAdamW", says="per parameter")
class Replicated(torch.optim.AdamW):
    """All-reduce and an ordinary AdamW: equal values, and no byte saved."""

    def __init__(self, params, lr, group=None, **options):
        super().__init__(params, lr, **options)
        self.group = group

    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"]]
        holder = nn.ParameterList(params)
        data.average_gradients_(holder, self.group)
        return super().step(closure)


@wrong("ZeroAdamW", says="off by")
class LocalAdamW(torch.optim.AdamW):
    def __init__(self, params, lr, group=None, **options):
        super().__init__(params, lr, **options)


@wrong("ZeroAdamW", says="skipped|skipping|no weight decay")
class DecaysWhatNobodyUsed(Zero):
    def step_flat(self, params, options):
        for p in params:
            p.grad = data.gradient_or_zeros(p)
        super().step_flat(params, options)


@wrong("ZeroAdamW", says="step count stands still|no weight decay")
class OneStepCountForAll(Zero):
    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)

    def adamw_(self, p, grad, state, options):
        if state:
            state["step"] = self.count - 1
        else:
            super().adamw_(p.clone(), grad * 0, state, options)
            state["step"] = self.count - 1
        super().adamw_(p, grad, state, options)


@wrong("ZeroAdamW", says="it is decoupled")
class CoupledWeightDecay(Zero):
    """Adam's L2 instead of AdamW's decay."""

    def adamw_(self, p, grad, state, options):
        coupled = options | {"weight_decay": 0.0}
        super().adamw_(p, grad + options["weight_decay"] * p, state, coupled)


@wrong("ZeroAdamW", says="no weight decay reached")
class NoWeightDecay(Zero):
    def adamw_(self, p, grad, state, options):
        super().adamw_(p, grad, state, options | {"weight_decay": 0.0})


@wrong("ZeroAdamW", says="group's own lr and weight_decay|at every step")
class OptionsOfTheFirstGroup(Zero):
    def adamw_(self, p, grad, state, options):
        super().adamw_(p, grad, state, self.param_groups[0])


@wrong("ZeroAdamW", says="bias-corrected")
class NoBiasCorrection(Zero):
    def adamw_(self, p, grad, state, options):
        super().adamw_(p.clone(), grad, state, options)
        p.mul_(1 - options["lr"] * options["weight_decay"])
        denominator = state["exp_avg_sq"].sqrt() + options["eps"]
        p.addcdiv_(state["exp_avg"], denominator, value=-options["lr"])


@wrong("ZeroAdamW", says="were added up over the ranks")
class SummedGradients(Zero):
    def adamw_(self, p, grad, state, options):
        super().adamw_(p, grad * dist.get_world_size(self.group), state, options)


@wrong("ZeroAdamW", says="own group at every step")
class LearningRateOfTheStart(Zero):
    def __init__(self, params, lr, **options):
        super().__init__(params, lr, **options)
        self.first = lr

    def adamw_(self, p, grad, state, options):
        super().adamw_(p, grad, state, options | {"lr": self.first})


@wrong("ZeroAdamW", says="off by|gather the parameters")
class NeverGathers(Zero):
    def step_flat(self, params, options):
        before = [p.detach().clone() for p in params]
        super().step_flat(params, options)
        n = -(-sum(p.numel() for p in params) // dist.get_world_size(self.group))
        begin = -n * dist.get_rank(self.group)
        for p, old in zip(params, before, strict=True):
            lo, hi = max(begin, 0), min(begin + p.numel(), n)
            lo, hi = lo - begin, max(hi, lo) - begin
            new = old.flatten()
            new[lo:hi] = p.flatten()[lo:hi]
            begin += p.numel()
            p.copy_(new.view_as(p))


@wrong("ZeroAdamW", says="values per parameter")
class FullMasterCopy(Zero):
    def step_flat(self, params, options):
        super().step_flat(params, options)
        copies = getattr(self, "copies", [])
        self.copies = [*copies[-1:], [p.clone() for p in params]]


@wrong("ZeroAdamW", says="through collectives")
class GathersEveryRanksGradients(Zero):
    def step_flat(self, params, options):
        used = data.has_gradient(params, self.group)
        for p in (p for p, has in zip(params, used, strict=True) if has):
            p.grad = data.gradient_or_zeros(p)
            every = all_gather_flat(p.grad.flatten(), self.group)
            world = dist.get_world_size(self.group)
            p.grad = every.view(world, -1).mean(0).view_as(p)
        super().step_flat(params, options)


@wrong("ZeroAdamW", says="closure")
class IgnoresTheClosure(Zero):
    def step(self, closure=None):
        super().step()


@wrong("ZeroAdamW", says="enable_grad")
class ClosureWithoutGradients(Zero):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


@wrong("ZeroAdamW", says="load_state_dict")
class StateDictWithoutState(Zero):
    def state_dict(self):
        return super().state_dict() | {"state": {}}


@wrong("ZeroAdamW", says="without gradients moved|moved a parameter")
class DecaysFrozenParameters(Zero):
    def step(self, closure=None):
        loss = super().step(closure)
        for p in (p for g in self.param_groups for p in g["params"]):
            if not p.requires_grad:
                p.mul_(0.9)
        return loss


# FullySharded

Sharded = zero.FullySharded


@right("FullySharded")
class ResizedStorage(nn.Module):
    """The way FSDP does it: one buffer whose storage is freed and filled again in place."""

    def __init__(self, module, group=None):
        super().__init__()
        self.module, self.group = module, group
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        named = list(module.named_parameters())
        flat = flatten_padded([p for _, p in named], world)
        self.shard = nn.Parameter(flat.view(world, -1)[rank].clone())
        self.full = torch.empty_like(flat)
        self.size = self.full.untyped_storage().nbytes()
        self.full.untyped_storage().resize_(0)
        self.spots = []
        for name, p in named:
            owner = module.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            self.spots.append((owner, leaf, p.shape))
            del owner._parameters[leaf]

    def fill(self):
        self.full.untyped_storage().resize_(self.size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.full):
            dist.all_gather_single(self.full, self.shard.detach(), group=self.group)

    def empty(self):
        self.full.untyped_storage().resize_(0)

    def forward(self, *args, **kwargs):
        self.fill()
        joined = _Joined.apply(self.shard, self.full, self)
        at = 0
        for owner, leaf, shape in self.spots:
            setattr(owner, leaf, joined[at : at + shape.numel()].view(shape))
            at += shape.numel()
        out = self.module(*args, **kwargs)
        self.empty()
        if out.requires_grad:
            out.register_hook(lambda grad: self.fill())
        return out


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, full, owner):
        ctx.owner = owner
        return full.view(-1)

    @staticmethod
    def backward(ctx, grad):
        owner = ctx.owner
        owner.empty()
        mine = torch.empty_like(owner.shard)
        dist.reduce_scatter_single(mine, grad.contiguous(), group=owner.group)
        return mine / dist.get_world_size(owner.group), None, None


@wrong("FullySharded", says="keeps \\d+ parameters|trains|whole batch")
class ReplicatedModule(nn.Module):
    """Whole parameters on every rank, gradients averaged: data parallel under another name."""

    def __init__(self, module, group=None):
        super().__init__()
        self.module, self.group = module, group
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.average)

    def average(self, p):
        dist.all_reduce(p.grad, group=self.group)
        p.grad /= dist.get_world_size(self.group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@wrong("FullySharded", says="autograd, which saves weights|had full weights")
class SavedByAutograd(Sharded):
    """Drops its own reference after forward; autograd's stays."""

    def pack(self, tensor):
        return tensor


@wrong("FullySharded", says="had full weights")
class KeepsThemForBackward(Sharded):
    """One all-gather a step, and the whole model in memory between forward and backward."""

    def expose(self, full):
        self.hoard = full.detach()
        super().expose(full)


@wrong("FullySharded", says="had full weights")
class FreesAtTheEndOfBackward(Sharded):
    hoard: list = []  # noqa: RUF012

    def before_backward(self, grad):
        super().before_backward(grad)
        self.hoard.append(self.full)
        torch.autograd.Variable._execution_engine.queue_callback(self.hoard.clear)


@wrong("FullySharded", says="after construction|holds \\d+ bytes")
class KeepsTheOriginals(Sharded):
    def __init__(self, module, group=None):
        originals = [p.detach() for p in module.parameters()]
        super().__init__(module, group)
        self.originals = originals


@wrong("FullySharded", says="bytes after step 0")
class KeepsACopyOfTheFull(Sharded):
    def expose(self, full):
        self.copied = full.detach().clone()
        super().expose(full)


@wrong("FullySharded", says="bytes after step 0")
class KeepsTheFullGradient(Sharded):
    """Unpacked weights are views of one flat leaf, whose gradient comes whole."""

    def before_backward(self, grad):
        super().before_backward(grad)
        self.summed = torch.zeros_like(self.full)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, owner):
        ctx.owner = owner
        return owner.gather()

    @staticmethod
    def backward(ctx, grad):
        return ctx.owner.finish_backward(grad), None


class _Variant(Sharded):
    """FullySharded whose backward collective a subclass writes."""

    def forward(self, *args, **kwargs):
        original, zero.Unshard = zero.Unshard, _Summed
        try:
            return super().forward(*args, **kwargs)
        finally:
            zero.Unshard = original


@wrong("FullySharded", says="mean over the ranks, not the sum")
class SumOfGradients(_Variant):
    def finish_backward(self, grad):
        self.release()
        return reduce_scatter_mean(grad.contiguous(), self.group) * dist.get_world_size(self.group)


@wrong("FullySharded", says="all_reduce was called|reduce_scatter")
class AllReduceAndSlice(_Variant):
    def finish_backward(self, grad):
        self.release()
        grad = grad.clone()
        dist.all_reduce(grad, group=self.group)
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return grad.chunk(world)[rank].clone() / world


@wrong("FullySharded", says="mean over the ranks|trains|norm")
class OwnGradientOnly(_Variant):
    def finish_backward(self, grad):
        self.release()
        return grad.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)].clone()


@wrong("FullySharded", says="3 all|all_gather calls")
class GathersForEveryWeight(Sharded):
    """Unpacks every saved weight with an all-gather of its own."""

    def before_backward(self, grad):
        pass


@wrong("FullySharded", says="rank order|output")
class OffByOneRank(Sharded):
    def gather(self):
        full = super().gather()
        world = dist.get_world_size(self.group)
        full.copy_(full.view(world, -1).roll(1, 0).flatten())
        return full


@wrong("FullySharded", says="group|still running|never entered|1 rank")
class DefaultGroupRank(Sharded):
    """Cuts by the global rank, also inside a group."""

    def __init__(self, module, group=None):
        super().__init__(module, group)
        if group is not None and dist.get_world_size(group) < dist.get_world_size():
            full = self.gather()
            world = dist.get_world_size(group)
            self.shard.data.copy_(full.chunk(world)[dist.get_rank() % world])


# clip_grad_norm_sharded_


@right("clip_grad_norm_sharded_")
def norm_of_norms(shards, max_norm, group=None):
    from shardbook import device

    shards = [p for p in shards if p.grad is not None]
    norms = [p.grad.norm() for p in shards] or [torch.zeros((), device=device())]
    mine = torch.stack(norms).norm().reshape(1)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    total = torch.cat(every).norm()
    for p in shards:
        p.grad.mul_(min(1.0, max_norm / (float(total) + 1e-6)))
    return float(total)


def _clip(shards, max_norm, group, total_of, factor=None):
    from shardbook import device

    grads = [p.grad for p in shards if p.grad is not None]
    squares = sum((g.square().sum() for g in grads), torch.zeros((), device=device()))
    total = total_of(squares)
    for g in grads:
        g.mul_(factor(total) if factor else (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _reduced(x, group, op=dist.ReduceOp.SUM):
    dist.all_reduce(x, op=op, group=group)
    return x


@wrong("clip_grad_norm_sharded_", says="the norm")
def local_norm(shards, max_norm, group=None):
    return _clip(shards, max_norm, group, lambda s: s.sqrt())


@wrong("clip_grad_norm_sharded_", says="then take the root")
def sum_of_norms(shards, max_norm, group=None):
    return _clip(shards, max_norm, group, lambda s: _reduced(s.sqrt(), group))


@wrong("clip_grad_norm_sharded_", says="nothing is averaged")
def mean_of_squares(shards, max_norm, group=None):
    world = dist.get_world_size(group)
    return _clip(shards, max_norm, group, lambda s: (_reduced(s, group) / world).sqrt())


@wrong("clip_grad_norm_sharded_", says="never more than 1")
def always_scales(shards, max_norm, group=None):
    return _clip(
        shards, max_norm, group, lambda s: _reduced(s, group).sqrt(), lambda total: max_norm / total
    )


@wrong("clip_grad_norm_sharded_", says="gradient \\d")
def never_scales(shards, max_norm, group=None):
    return _clip(shards, max_norm, group, lambda s: _reduced(s, group).sqrt(), lambda total: 1.0)


@wrong("clip_grad_norm_sharded_", says="group|still running|1 rank|of 1")
def whole_world(shards, max_norm, group=None):
    first = group is None or dist.get_world_size(group) == dist.get_world_size()
    return _clip(
        shards,
        max_norm,
        group,
        lambda s: (_reduced(s, group) * (1 if first else dist.get_world_size())).sqrt(),
    )


@wrong("clip_grad_norm_sharded_", says="takes part|same collective|rank 0")
def skips_where_there_is_none(shards, max_norm, group=None):
    shards = list(shards)
    if all(p.grad is None for p in shards):
        return torch.zeros(())
    return zero.clip_grad_norm_sharded_(shards, max_norm, group)


@wrong("clip_grad_norm_sharded_", says="bytes")
def gathers_all_gradients(shards, max_norm, group=None):
    shards = list(shards)
    grads = [p.grad.flatten() for p in shards if p.grad is not None]
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, torch.cat(grads).cpu() if grads else torch.zeros(1), group=group)
    total = torch.cat(every).norm()
    for p in shards:
        if p.grad is not None:
            p.grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0).to(p.grad.device))
    return total


@wrong("clip_grad_norm_sharded_", says="parameter")
def scales_parameters_too(shards, max_norm, group=None):
    shards = list(shards)
    total = zero.clip_grad_norm_sharded_(shards, max_norm, group)
    for p in shards:
        p.data.mul_(min(1.0, max_norm / float(total)))
    return total


def _half_clip(shards, max_norm, group, start):
    grads = [p.grad for p in shards if p.grad is not None]
    squares = start(grads)
    for g in grads:
        squares = squares + g.square().sum()
    total = _reduced(squares, group).sqrt()
    for g in grads:
        g.mul_((max_norm / (total.float() + 1e-6)).clamp(max=1.0))
    return total


@wrong("clip_grad_norm_sharded_", says="beyond 65504")
def squares_in_fp16(shards, max_norm, group=None):
    from shardbook import device

    return _half_clip(shards, max_norm, group, lambda grads: torch.zeros((), device=device()))


@wrong("clip_grad_norm_sharded_", says="stands still at 256")
def sums_in_bf16(shards, max_norm, group=None):
    from shardbook import device

    def start(grads):
        dtype = grads[0].dtype if grads else torch.float32
        return torch.zeros((), dtype=dtype, device=device())

    return _half_clip(list(shards), max_norm, group, start)


# training_memory


@right("training_memory")
def by_table(num_params, world_size, stage):
    if stage not in range(4) or world_size <= 0:
        raise ValueError(f"no ZeRO stage {stage} on {world_size} ranks")
    result = {}
    for key, size, first in (("optimizer", 12, 1), ("grads", 2, 2), ("params", 2, 3)):
        parts = world_size if stage >= first else 1
        result[key] = size * ((num_params + parts - 1) // parts)
    return result


@wrong("training_memory", says="sum in GB")
def nothing_is_cut(num_params, world_size, stage):
    return {"params": 2 * num_params, "grads": 2 * num_params, "optimizer": 12 * num_params}


@wrong("training_memory", says="sum in GB")
def no_master_copy(num_params, world_size, stage):
    found = zero.training_memory(num_params, world_size, stage)
    return found | {"optimizer": found["optimizer"] * 8 // 12}


@wrong("training_memory", says="sum in GB")
def stages_off_by_one(num_params, world_size, stage):
    return zero.training_memory(num_params, world_size, min(3, stage + 1))


@wrong("training_memory", says="rounded up|no int|expected")
def rounded_down(num_params, world_size, stage):
    return {k: int(v) for k, v in exact(num_params, world_size, stage).items()}


@wrong("training_memory", says="whole elements|no int|expected")
def exact(num_params, world_size, stage):
    found = zero.training_memory(num_params * world_size, world_size, stage)
    whole = zero.training_memory(num_params, 1, 0)
    cut = {k: found[k] == whole[k] for k in found}
    return {k: whole[k] / (world_size if cut[k] else 1) for k in found}


@wrong("training_memory", says="sum in GB")
def gradients_in_fp32(num_params, world_size, stage):
    found = zero.training_memory(num_params, world_size, stage)
    return found | {"grads": 2 * found["grads"]}


@wrong("training_memory", says="accepted")
def takes_any_stage(num_params, world_size, stage):
    return zero.training_memory(num_params, max(1, world_size), max(0, min(3, stage)))
