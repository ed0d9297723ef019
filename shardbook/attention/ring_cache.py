"""A sliding window that moves nothing: position i is written to slot i mod W (arXiv 2310.06825)."""

import torch
from torch import Tensor


class RingCache:
    """The last `window` keys and values of each row, in [B, Hkv, window, D]; `length` [B] seen.

    They lie in the order of their slots, not of their positions. Attention of one new query does
    not care: it sums over all of them, and a key carries its position in its rotation.
    """

    def __init__(
        self, batch: int, num_kv_heads: int, window: int, head_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | None = None,
    ):  # fmt: skip
        shape = (batch, num_kv_heads, window, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)  # [B], all tokens seen
        self.window = window

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write k, v [B, Hkv, S, D]; keys and values of all slots, and the valid ones per row [B].

        A row's valid slots are its first ones until the ring is full, then all.
        """
        batch, _, new, _ = k.shape
        skip = max(0, new - self.window)  # of a longer chunk only the end survives
        at = self.length[:, None] + torch.arange(skip, new, device=k.device)  # [B, S]
        slots = at.remainder(self.window)
        rows = torch.arange(batch, device=k.device)[:, None]
        self.keys[rows, :, slots] = k[:, :, skip:].detach().transpose(1, 2).to(self.keys.dtype)
        self.values[rows, :, slots] = v[:, :, skip:].detach().transpose(1, 2).to(self.values.dtype)
        self.length = self.length + new
        return self.keys, self.values, self.length.clamp(max=self.window)
