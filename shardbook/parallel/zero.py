"""ZeRO: data parallel whose ranks each keep a part of what all of them kept whole.

Stage 1 cuts the optimizer state, stage 2 the gradients as well, stage 3 the parameters too
(Rajbhandari et al., arXiv 1910.02054). An all-reduce is a reduce-scatter and an all-gather; between
the two a rank needs its own part only, and that is where the memory is saved.
"""

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._seams import after_backward, tree_leaves
from ..devices import device as default_device
from .data import by_dtype, gradient_or_zeros, has_gradient
from .flat import all_gather_flat, flatten_padded, reduce_scatter_mean, shard_flat


class ZeroAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) whose moments are cut over the ranks: ZeRO stage 1.

    Laid end to end, the parameters of a group are cut into P equal parts; a rank keeps the moments
    of its part, updates it, and an all-gather puts the parameters together again. `step()` averages
    the gradients on its way, so the module needs no data parallel wrapper. A parameter whose
    gradient is None on every rank is skipped. The state is keyed by parameter, as torch does it,
    and holds this rank's slice of it.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        group: dist.ProcessGroup | None = None,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.group = group
        if any(p.itemsize < 4 for options in self.param_groups for p in options["params"]):
            warnings.warn(
                "ZeroAdamW updates 16-bit parameters in 16 bits, where a step below about 1/256 of "
                "a value is lost: give it fp32 parameters",
                stacklevel=2,
            )

    @torch.no_grad()
    def step(self, closure=None):
        """Average the gradients, update this rank's part, gather the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for options in self.param_groups:
            for params in by_dtype(options["params"]):
                self.step_flat(params, options)
        return loss

    def step_flat(self, params: list[Tensor], options: dict) -> None:
        """The step of parameters of one dtype."""
        used = has_gradient(params, self.group)
        if not any(used):
            return
        grads = [gradient_or_zeros(p) for p in params]
        world = dist.get_world_size(self.group)
        grad = reduce_scatter_mean(flatten_padded(grads, world), self.group)  # [n]
        mine = shard_flat(params, self.group)  # [n]
        n = mine.numel()
        begin = -n * dist.get_rank(self.group)  # of the next parameter, from the start of my part
        for p, has in zip(params, used, strict=True):
            lo, hi = max(begin, 0), min(begin + p.numel(), n)
            begin += p.numel()
            if has and lo < hi:
                self.adamw_(mine[lo:hi], grad[lo:hi], self.state[p], options)
        whole = all_gather_flat(mine, self.group)  # [P*n]
        sizes = [p.numel() for p in params]
        for p, new in zip(params, whole[: sum(sizes)].split(sizes), strict=True):
            p.copy_(new.view_as(p))

    def adamw_(self, p: Tensor, grad: Tensor, state: dict, options: dict) -> None:
        """Update a slice of a parameter in place; its moments live in `state`."""
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        (beta1, beta2), lr = options["betas"], options["lr"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        p.mul_(1 - lr * options["weight_decay"])  # decoupled: not through the moments
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        m_scale, v_scale = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        p.addcdiv_(m, (v / v_scale).sqrt_().add_(options["eps"]), value=-lr / m_scale)


class Unshard(torch.autograd.Function):
    """All-gather forward, reduce-scatter of the mean backward."""

    @staticmethod
    def forward(ctx, shard: Tensor, owner: "FullySharded") -> Tensor:
        ctx.owner = owner
        return owner.gather()  # [P*n]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.owner.release()  # every gradient of the module is in grad [P*n]: its work is done
        return reduce_scatter_mean(grad.contiguous(), ctx.owner.group), None  # [n]


def own_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(owner, name, parameter) of a module, without those inside a FullySharded further down."""
    if isinstance(module, FullySharded):
        return []
    found = [(module, name, p) for name, p in module.named_parameters(recurse=False)]
    return found + [x for child in module.children() for x in own_parameters(child)]


class FullySharded(nn.Module):
    """A module whose parameters live as one flat shard a rank: ZeRO stage 3, or FSDP.

        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullySharded(block)
        model = FullySharded(model)  # what is left: embedding, norm, head
        optimizer = torch.optim.AdamW(model.parameters())  # ordinary, on the shards

    `shard` [ceil(numel / P)] is the only parameter; build it from the same module on every rank.
    Forward gathers the full parameters, computes and lets them go; backward gathers them again,
    and the mean gradient arrives reduce-scattered in `shard.grad`. Parameters inside a FullySharded
    further down stay there. ValueError for mixed dtypes or for some parameters frozen and some not.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, group
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # tied ones have several
        for owner, name, p in own_parameters(module):
            places.setdefault(p, []).append((owner, name))
        if not places:
            raise ValueError("the module has no parameters of its own to shard")
        if len({(p.dtype, p.requires_grad) for p in places}) > 1:
            raise ValueError(
                "one flat shard has one dtype and is trained or frozen as a whole; "
                "wrap the parts that differ in a FullySharded each"
            )
        self.places = [(p.shape, where) for p, where in places.items()]
        mine = shard_flat(list(places), group)  # [n]
        self.shard = nn.Parameter(mine, requires_grad=next(iter(places)).requires_grad)
        for where in places.values():
            for owner, name in where:
                delattr(owner, name)
        self.full: Tensor | None = None  # [P*n], while the module computes

    def forward(self, *args, **kwargs):
        self.expose(Unshard.apply(self.shard, self))
        try:
            # Autograd saves weights for backward, and would keep all of them alive until then.
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                output = self.module(*args, **kwargs)
        finally:
            self.release()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self.before_backward)
        return output

    def gather(self) -> Tensor:
        """All-gather the full parameters, flat and padded [P*n]."""
        return all_gather_flat(self.shard.detach(), self.group)

    def expose(self, full: Tensor) -> None:
        """Put views of full [P*n] where the module's code looks for its parameters."""
        self.full = full
        sizes = [shape.numel() for shape, _ in self.places]
        *pieces, _padding = full.split([*sizes, full.numel() - sum(sizes)])
        for (shape, where), piece in zip(self.places, pieces, strict=True):
            for owner, name in where:
                setattr(owner, name, piece.view(shape))

    def release(self) -> None:
        """Let the full parameters go: nothing else holds them."""
        if self.full is None:
            return
        lost = self.full.is_leaf and self.full.grad is not None
        self.full = None
        for owner, name in (place for _, where in self.places for place in where):
            delattr(owner, name)
        if lost:
            raise RuntimeError(
                "a reentrant checkpoint inside a FullySharded keeps gradients from its shard: "
                "use checkpoint(…, use_reentrant=False)"
            )

    def before_backward(self, grad: Tensor) -> None:
        """The gradient has reached the module's output: its weights are needed once more."""
        if self.full is None:
            with torch.enable_grad():  # as in forward, for a checkpoint inside that recomputes
                self.expose(self.gather().requires_grad_(self.shard.requires_grad))
            # Unshard.backward releases them; at the latest the end of backward does.
            after_backward(self.release)

    def pack(self, tensor: Tensor) -> Tensor | tuple:
        """What autograd keeps in place of a saved tensor: of a weight only where it lies."""
        full, storage = self.full, tensor.untyped_storage()
        if full is None or full.untyped_storage().data_ptr() != storage.data_ptr():
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Tensor | tuple) -> Tensor:
        """What backward gets back: a view of the parameters gathered anew."""
        if isinstance(packed, Tensor):
            return packed
        return (self.gather() if self.full is None else self.full).as_strided(*packed)


@torch.no_grad()
def clip_grad_norm_sharded_(
    shards: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale the gradients so that the norm of the full gradient is at most max_norm.

    shards are this rank's parameters; each element of the model is on exactly one rank of the
    group. Returns the norm before clipping (fp32, no dimensions), the same on every rank.
    """
    shards = [shards] if isinstance(shards, Tensor) else shards
    grads = [p.grad for p in shards if p.grad is not None]
    device = grads[0].device if grads else default_device()
    squares = torch.zeros((), device=device)
    for g in grads:
        squares += g.float().square().sum()
    dist.all_reduce(squares, group=group)  # squares add up over ranks, norms do not
    total_norm = squares.sqrt()
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for g in grads:
        g.mul_(scale)
    return total_norm


def training_memory(num_params: int, world_size: int, stage: int) -> dict[str, int]:
    """Bytes a rank holds for bf16 parameters and gradients with fp32 Adam, by ZeRO stage.

    Per parameter 2 + 2 + 12 bytes (master copy, m and v in fp32; arXiv 1910.02054, section 3.1).
    Stage 1 cuts the optimizer's, 2 the gradients too, 3 the parameters too; 0 is data parallel.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage}; ZeRO has stages 1, 2 and 3, and 0 is data parallel")
    if num_params < 0 or world_size < 1:
        raise ValueError(f"cannot cut {num_params} parameters over {world_size} ranks")
    shard = -(-num_params // world_size)  # rounded up
    return {
        "params": 2 * (shard if stage >= 3 else num_params),
        "grads": 2 * (shard if stage >= 2 else num_params),
        "optimizer": 12 * (shard if stage >= 1 else num_params),
    }
