"""Traces of models that nobody here wrote: transformers and diffusers, tiny and random."""

import pytest
import torch

import shardbook as sb
from shardbook.tracing import validate

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, max_position_embeddings=32, **SIZES, **HEADS)
    return LlamaForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=64, num_local_experts=4, **SIZES, **HEADS)
    return MixtralForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=16, patch_size=4, num_attention_heads=4, **SIZES)
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.tensor([0, 1]),
    }


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 20),
        "labels": tokens(),
    }


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)
    return MambaForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


def dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 5]),
        "class_labels": torch.tensor([0, 3]),
    }


def tokens():
    return torch.randint(3, 64, (2, 12))


@pytest.mark.parametrize("make", [llama, mixtral, t5, vit, whisper, mamba, dit])
def test_a_foreign_model_forward_and_backward(make):
    torch.manual_seed(0)
    model, inputs = make()
    want = [p.detach().clone() for p in gradients(model, inputs)]
    with sb.trace(model) as t:
        got = gradients(model, inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    chrome = t.chrome()
    assert validate(chrome) == []

    rows = {row["name"]: row for row in t.table()}
    modules = dict(model.named_modules())
    assert rows.keys() == modules.keys()
    for name, module in modules.items():
        assert rows[name]["parameters"] == sum(p.numel() for p in module.parameters()), name
        assert rows[name]["type"] == type(module).__name__
    assert rows[""]["calls"] == 1
    assert "[2, " in rows[""]["inputs"] and "[2, " in rows[""]["outputs"]

    slices = [e for e in chrome["traceEvents"] if e["ph"] == "X"]
    backward = {e["name"].removesuffix(" (backward)") for e in slices if e["cat"] == "backward"}
    # modules whose own parameters got a gradient worked in backward
    for name, module in modules.items():
        if rows[name]["calls"] and any(p.grad is not None for p in module.parameters(False)):
            assert name in backward, name


def gradients(model, inputs):
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**inputs)
    loss = out.loss if getattr(out, "loss", None) is not None else out[0].square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_flops_are_those_of_torch():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, inputs = llama()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            model(**inputs)
        with sb.trace(model, flops=True) as t:
            model(**inputs)
    assert t.table()[0]["flops"] == counter.get_total_flops() > 0
    with torch.no_grad(), sb.trace(model, flops=True) as t:  # the CPU's own attention
        model(**inputs)
    assert t.table()[0]["flops"] == counter.get_total_flops()
