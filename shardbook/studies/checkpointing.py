"""Activation checkpointing of the small model's blocks: what backward keeps, what is done twice.

None keeps every activation; full keeps each block's input and runs the block again in backward
(Chen et al., arXiv 1604.06174); selective keeps what matrix products gave and runs the rest again.
"""

import gc
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from .._seams import TorchDispatchMode, tree_leaves
from ..basics.tiny import TinyLM, counting_batch, token_loss

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Made(TorchDispatchMode):
    """The memory of every tensor that is made inside the block, and whether it is still there.

    A view is in the memory of what it was given, so it is not made.
    """

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                storage = t.untyped_storage()
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> int:
        """Bytes of what was made and is still there, by whoever it is held."""
        gc.collect()
        return sum(nbytes for held, nbytes in self.storages.values() if not held.expired())


def products_stay(ctx: object, op: object, *args, **kwargs) -> CheckpointPolicy:
    """Results of matrix products are dear to compute: keep them. Everything else is cheap."""
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model: TinyLM, kind: str) -> TinyLM:
    """The same model whose blocks keep "everything", "block inputs" or "products" for backward."""
    options = {"use_reentrant": False}
    if kind == "products":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, products_stay)
    for block in model.blocks if kind != "everything" else ():
        block.forward = partial(checkpoint, block.forward, **options)
    return model


def measured(kind: str, layers: int, batch: int = 2, seq: int = 128) -> tuple[int, int, Tensor]:
    """(bytes alive after forward, FLOPs of forward and backward, all gradients), on the host."""
    torch.manual_seed(0)
    model = checkpointed(TinyLM(num_layers=layers), kind)
    tokens, targets = counting_batch(0, batch, seq)
    with FlopCounterMode(display=False) as flops:
        with Made() as made:
            loss = token_loss(model(tokens, torch.arange(seq)), targets)
        kept = made.alive()
        loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return kept, flops.get_total_flops(), gradients
