"""Attention under a mask against SDPA, and its tiles against torch's BlockMask."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from shardbook.attention.counting import largest_tensor
from shardbook.attention.masks import (
    block_kinds,
    causal,
    documents,
    masked_attention,
    sliding_window,
)

MASKS = {
    "causal": causal,
    "window": sliding_window(40),
    "documents": documents([50, 3, 107, 40]),
    "nothing for the first": lambda i, j: j < i - 5,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_equals_sdpa_with_the_mask(name, kv_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 200, 8, generator=generator) for h in (6, kv_heads, kv_heads))
    at = torch.arange(200)
    look = MASKS[name](at[:, None], at)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=look, enable_gqa=True)
    wanted = wanted.masked_fill(~look.any(-1)[:, None], 0.0)
    out, lse = masked_attention(q, k, v, MASKS[name], 32, 48)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(lse[0, 0] == -torch.inf, ~look.any(-1))


@pytest.mark.parametrize("name", MASKS)
def test_the_tiles_are_those_of_torchs_block_mask(name):
    sees = MASKS[name]
    mask = create_block_mask(
        lambda b, h, i, j: sees(i, j), None, None, 192, 192, device="cpu", BLOCK_SIZE=32
    )
    kinds = block_kinds(sees, 192, 192, 32, 32)
    whole = mask.full_kv_num_blocks[0, 0]
    cut = mask.kv_num_blocks[0, 0]
    assert torch.equal((kinds == 2).sum(1), whole.long())
    assert torch.equal((kinds == 1).sum(1), cut.long())
    assert torch.equal(kinds > 0, mask.to_dense()[0, 0].bool())


def test_makes_no_matrix_and_names_heads_that_do_not_fit():
    q, k = torch.zeros(1, 4, 300, 4), torch.zeros(1, 2, 300, 4)
    assert largest_tensor(lambda: masked_attention(q, k, k, causal)) < 300 * 300
    with pytest.raises(ValueError, match="4 heads do not divide by 3"):
        masked_attention(q, k[:, :1].expand(-1, 3, -1, -1), k[:, :1].expand(-1, 3, -1, -1), causal)
