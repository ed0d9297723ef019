"""Tensor and sequence parallelism beyond the checks: whole models, torch's own, traps."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardbook as sb
from shardbook import calls
from shardbook.basics.tiny import counting_batch, tiny_lm, token_loss
from shardbook.memory import storage_bytes
from shardbook.parallel import tensor
from shardbook.parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
from shardbook.pictures import tensor as tensor_pictures
from shardbook.studies.tensor_lm import SequenceParallelLM, parallel_token_loss, tensor_parallel_

SIZES = {"vocab": 60, "dim": 40, "num_layers": 3, "num_heads": 4, "hidden": 72}
BATCH = {"batch": 3, "seq": 12, "vocab": 60}


def run_model(kind, kv_heads, dtype=torch.float32, steps=1):
    """What a rank sees of `steps` SGD steps, and the calls and memory of the first."""
    model = tiny_lm(num_kv_heads=kv_heads, **SIZES).to(sb.device(), dtype)
    loss_fn = token_loss if kind == "whole" else parallel_token_loss
    if kind == "tensor":
        model = tensor_parallel_(model)
    elif kind.startswith("sequence"):
        model = SequenceParallelLM(model, keeps_shard="shard" in kind)
    positions = torch.arange(BATCH["seq"], device=sb.device())
    found, saved = {"losses": []}, []
    for step in range(steps):
        tokens, targets = (t.to(sb.device()) for t in counting_batch(step % 2, **BATCH))
        pack = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
        with calls.record() as forward, pack:
            loss = loss_fn(model(tokens, positions), targets)
        with calls.record() as backward:
            loss.backward()
        if step == 0:
            weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
            kept = [t for t in saved if t.untyped_storage().data_ptr() not in weights]
            found |= {
                "forward": calls.summary(forward),
                "backward": calls.summary(backward),
                "weights": storage_bytes(model.parameters()),
                "activations": storage_bytes(kept),
                "grads": {n: p.grad.cpu().clone() for n, p in model.named_parameters()},
            }
        saved.clear()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
                p.grad = None
        found["losses"].append(loss.item())
    return found


KV_HEADS = (4, 2, 1)  # split over four ranks, copied to pairs, copied to all


def losses(kind):
    return [run_model(kind, kv_heads, steps=6)["losses"] for kv_heads in KV_HEADS]


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_model_trains_like_one_process(kind):
    whole = losses("whole")
    assert all(w[0] - w[4] > 0.2 for w in whole), "the model learns in these steps"
    for size in (2, 4):
        for found in sb.run(losses, kind, world_size=size).values:
            for ours, one in zip(found, whole, strict=True):
                # Sums in another order; six steps of SGD do not amplify them beyond this.
                assert ours == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_bytes_and_memory_are_the_closed_forms(kind):
    whole = run_model("whole", 4)
    found = sb.run(run_model, kind, 4, world_size=4).values[0]
    layers, act = SIZES["num_layers"], 3 * 12 * 40 * 4  # [B, S, D] in fp32
    loss_bytes = 3 * 3 * 12 * 4  # three all-reduces of B S values
    if kind == "tensor":
        count, nbytes = 2 * layers + 1, (2 * layers + 1) * act
        assert found["forward"] == {"all_reduce": (count + 3, nbytes + loss_bytes)}
        assert found["backward"] == {"all_reduce": (count, nbytes)}
    else:
        assert found["forward"] == {
            "all_reduce": (4, act + loss_bytes),
            "all_gather": (2 * layers + 1, (2 * layers + 1) * act),
            "reduce_scatter": (2 * layers, 2 * layers * act),
        }
        sums = layers * 6 + 2  # two norms' weight and bias, two biases a layer; the last norm's
        assert found["backward"] == {
            "reduce_scatter": (2 * layers + 1, (2 * layers + 1) * act),
            "all_gather": (2 * layers + 1, (2 * layers + 1) * act),
            "all_reduce": (sums, sums * 40 * 4),
        }
    cut = 2 * 60 * 40 + layers * (40 * 120 + 120 + 40 * 40 + 2 * 40 * 72 + 72)
    full = layers * (4 * 40 + 2 * 40) + 2 * 40
    assert whole["weights"] == 4 * (cut + full)
    assert found["weights"] == 4 * (cut // 4 + full)
    assert found["activations"] < 0.6 * whole["activations"]


def test_sequence_parallel_keeps_less():
    kinds = ("tensor", "sequence", "sequence, shard")
    tensor, sequence, shard = (sb.run(run_model, k, 4, world_size=4).values[0] for k in kinds)
    assert sequence["activations"] < 0.9 * tensor["activations"]
    # the input of each half and of the head, of which a rank keeps one part in four
    gathered = (2 * SIZES["num_layers"] + 1) * 4 * 3 * 12 * SIZES["dim"]
    assert sequence["activations"] - shard["activations"] == gathered * 3 // 4
    for name, grad in sequence["grads"].items():
        assert torch.allclose(grad, shard["grads"][name], atol=1e-5), name
    more = {op: shard["backward"][op][0] - n for op, (n, _) in sequence["backward"].items()}
    assert more == {"all_gather": 2 * SIZES["num_layers"] + 1, "reduce_scatter": 0, "all_reduce": 0}


def dtensor_step():
    """parallelize_module and loss_parallel on the same model, qkv's rows in rank order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model, size = tiny_lm(**SIZES).to(sb.device()), dist.get_world_size()
    for block in model.blocks:
        attn = block.attn
        rows = torch.arange(attn.qkv.out_features).view(3, size, -1).transpose(0, 1).flatten()
        with torch.no_grad():
            attn.qkv.weight.copy_(attn.qkv.weight[rows.to(sb.device())])
            attn.qkv.bias.copy_(attn.qkv.bias[rows.to(sb.device())])
        attn.num_heads //= size
        attn.num_kv_heads //= size
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attn.qkv": ColwiseParallel(),
        "blocks.*.attn.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh(sb.device().type, (size,)), plan)
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, **BATCH))
    with sb.trace(model) as t, loss_parallel():
        with calls.record() as forward:
            logits = model(tokens, torch.arange(12, device=sb.device()))
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        with calls.record() as backward:
            loss.backward()

    def mine(p):  # torch leaves the embedding's gradient whole on every rank
        g = p.grad
        return g.redistribute(placements=p.placements).to_local() if hasattr(g, "placements") else g

    grads = {n: mine(p).cpu() for n, p in model.named_parameters()}
    return {
        "losses": [loss.full_tensor().item()],
        "forward": calls.summary(forward),
        "backward": calls.summary(backward),
        "weights": storage_bytes(model.parameters()),
        "grads": grads,
        "table": t.table().rows,
    }


def test_equals_parallelize_module_in_values_bytes_and_memory():
    for ours, theirs in zip(
        sb.run(run_model, "tensor", 4, world_size=4).values,
        sb.run(dtensor_step, world_size=4).values,
        strict=True,
    ):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
        for what in ("forward", "backward", "weights"):
            assert ours[what] == theirs[what], what
        named = {n: g for n, g in ours["grads"].items() if n in theirs["grads"]}
        assert len(named) > 15
        for name, grad in named.items():
            torch.testing.assert_close(grad, theirs["grads"][name], atol=1e-6, rtol=1e-4)
        for i in range(SIZES["num_layers"]):  # q and kv apart with us, one weight with torch
            parts = [ours["grads"][f"blocks.{i}.attn.{n}.weight"] for n in ("q", "kv")]
            together = theirs["grads"][f"blocks.{i}.attn.qkv.weight"]
            torch.testing.assert_close(torch.cat(parts), together, atol=1e-6, rtol=1e-4)


def test_table_shows_shard_and_full_shape():
    rows = {
        row["name"]: row["own"] for row in sb.run(dtensor_step, world_size=4).values[0]["table"]
    }
    assert rows["embed"]["weight"] == "float32[15, 40] of [60, 40] S(0)"
    assert rows["blocks.1.mlp.down"]["weight"] == "float32[40, 18] of [40, 72] S(1)"
    assert rows["norm"]["weight"] == "float32[40]"


def bf16_losses():
    return run_model("tensor", 2, torch.bfloat16)["losses"][0]


def test_bf16():
    whole = run_model("whole", 2)["losses"][0]
    assert sb.run(bf16_losses, world_size=4).values == pytest.approx([whole] * 4, abs=0.05)


def adjoint_errors():
    """<A x, y> - <x, A' y>, summed over ranks, of the two pairs that are each other's transpose."""
    rank, errors = dist.get_rank(), []
    for fn, shape in (
        (tensor.all_gather_to_group, (3, 5)),
        (tensor.reduce_scatter_to_group, (3, 20)),
    ):
        rng = torch.Generator().manual_seed(rank)
        x = torch.randn(shape, generator=rng).to(sb.device()).requires_grad_()
        y = fn(x, -1)
        z = torch.randn(y.shape, generator=rng).to(sb.device())
        (back,) = torch.autograd.grad(y, x, z)
        gap = ((y * z).sum() - (x * back).sum()).detach()
        dist.all_reduce(gap)
        errors.append(gap.item())
    return errors


def test_gather_and_reduce_scatter_are_each_others_transpose():
    assert sb.run(adjoint_errors, world_size=4).values[0] == pytest.approx([0, 0], abs=1e-4)


def padded_embedding():
    full = nn.Embedding(12, 5, padding_idx=7).to(sb.device())
    ours = VocabParallelEmbedding(full)
    tokens = torch.tensor([[7, 1, 7], [11, 0, 5]], device=sb.device())
    ours(tokens).square().sum().backward()
    full(tokens).square().sum().backward()
    return ours.weight.grad.cpu(), full.weight.grad.cpu()


def test_embedding_gives_the_padding_row_no_gradient():
    found = sb.run(padded_embedding, world_size=2).values
    torch.manual_seed(0)
    (a, _), (b, _) = found
    assert a.abs().sum() > 0
    assert b[1].abs().sum() == 0, "row 7 is row 1 of rank 1"
    assert b[5].abs().sum() > 0


def masked_logits():
    """-inf logits of a padded vocabulary, all of them on the last rank."""
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    logits[:, 9:] = float("-inf")
    mine = logits.chunk(4, -1)[dist.get_rank()].to(sb.device()).requires_grad_()
    targets = torch.tensor([0, 8, 3, -100], device=sb.device())
    loss = vocab_parallel_cross_entropy(mine, targets)
    loss.sum().backward()
    wanted = F.cross_entropy(logits, targets.cpu(), reduction="none")
    return loss.detach().cpu(), wanted, mine.grad.isfinite().all().item()


def test_loss_with_a_padded_vocabulary():
    for loss, wanted, finite in sb.run(masked_logits, world_size=4).values:
        torch.testing.assert_close(loss, wanted)
        assert finite


def refused():
    messages = []
    for make in (
        lambda: tensor.ColumnParallelLinear(nn.Linear(4, 10)),
        lambda: tensor.RowParallelLinear(nn.Linear(10, 4)),
        lambda: tensor.ParallelAttention(nn.Linear(4, 36), nn.Linear(12, 4), 4, 4 - 1),
        lambda: VocabParallelEmbedding(nn.Embedding(10, 4)),
        lambda: tensor.scatter_to_group(torch.zeros(2, 10), 1),
    ):
        with pytest.raises(ValueError) as error:
            make()
        messages.append(str(error.value))
    return messages


def test_errors_name_what_does_not_divide():
    column, row, attention, vocab, scatter = sb.run(refused, world_size=4).values[0]
    for message, words in (
        (column, ["out_features is 10", "4 ranks"]),
        (row, ["in_features is 10", "4 ranks"]),
        (attention, ["3 kv heads", "4 heads", "4 ranks"]),
        (vocab, ["num_embeddings is 10"]),
        (scatter, ["dimension 1 is 10"]),
    ):
        assert all(word in message for word in words), message


@pytest.mark.parametrize("sequence", [False, True])
def test_picture_names_the_collectives(sequence):
    fig = tensor_pictures.draw_half_block(sequence)
    texts = [t.get_text() for t in fig.axes[0].texts]
    wanted = ["all-gather", "reduce-scatter"] if sequence else ["f: identity", "g: all-reduce"]
    assert all(w in texts for w in wanted)


def frozen_and_without_bias():
    model = tiny_lm(**SIZES).to(sb.device())
    model.embed.weight.requires_grad_(False)
    assert not VocabParallelEmbedding(model.embed).weight.requires_grad
    for block in model.blocks:
        block.attn.out.bias = None
    model.head.bias = nn.Parameter(torch.linspace(-1, 1, SIZES["vocab"], device=sb.device()))
    positions = torch.arange(BATCH["seq"], device=sb.device())
    tokens, targets = (t.to(sb.device()) for t in counting_batch(0, **BATCH))
    targets[:, :5] = -100  # what must not count
    whole = token_loss(model(tokens, positions), targets)
    parallel = SequenceParallelLM(model)
    loss = parallel_token_loss(parallel(tokens, positions), targets)
    return whole.item(), loss.item()


def test_ignored_targets_missing_and_present_biases_and_a_frozen_table():
    for whole, loss in sb.run(frozen_and_without_bias, world_size=2).values:
        assert loss == pytest.approx(whole, rel=1e-5)
