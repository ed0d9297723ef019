"""The two ends of a tensor-parallel language model, cut along the vocabulary (arXiv 1909.08053)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .tensor import Group, own_slice, reduce_from_group, share_of


class VocabParallelEmbedding(nn.Module):
    """tokens [..] -> [.., D] on every rank; weight [V/P, D] is this rank's rows of the table."""

    def __init__(self, embedding: nn.Embedding, group: Group = None):
        super().__init__()
        share = share_of(embedding.num_embeddings, dist.get_world_size(group), "num_embeddings")
        self.group, self.first = group, dist.get_rank(group) * share
        table = embedding.weight  # frozen in the full layer, frozen here
        self.weight = nn.Parameter(own_slice(table.detach(), 0, group), table.requires_grad)
        pad = -1 if embedding.padding_idx is None else embedding.padding_idx - self.first
        self.padding_idx = pad if 0 <= pad < share else None

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))  # [..], rows that another rank has
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_idx)  # [.., D]
        return reduce_from_group(x.masked_fill(elsewhere[..., None], 0), self.group)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """Cross-entropy per token, from this rank's logits [.., V/P] and targets [..] in [0, V).

    loss = log sum_j exp(z_j) - z_target. Of the sum and of z_target each rank knows its addend, so
    three all-reduces of one value a token (the largest logit first, for safety) replace an
    all-gather of V. A target of -100 gives 0. Computed in fp32 at least, returned in logits' dtype.
    """
    z = logits.float() if logits.itemsize < 4 else logits
    with torch.no_grad():  # any constant gives the same loss: no gradient flows through it
        largest = z.amax(-1)  # [..]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    z = z - largest[..., None]

    local = targets - dist.get_rank(group) * z.shape[-1]
    elsewhere = (local < 0) | (local >= z.shape[-1])  # [..], also where the target is -100
    mine = z.gather(-1, local.masked_fill(elsewhere, 0)[..., None])[..., 0]  # [..]
    target = reduce_from_group(mine.masked_fill(elsewhere, 0), group)
    total = reduce_from_group(z.exp().sum(-1), group)  # [..]
    return (total.log() - target).masked_fill(targets == -100, 0).to(logits.dtype)
