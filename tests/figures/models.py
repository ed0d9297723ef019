"""Tiny models of many families, random weights, with the inputs of one forward pass."""

import torch
from torch import nn

Made = tuple[nn.Module, dict]


def tokens(length: int = 7, vocab: int = 71) -> torch.Tensor:
    return torch.randint(3, vocab, (2, length))


def bart() -> Made:
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 80}
    both = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sides.items()}
    config = BartConfig(vocab_size=71, d_model=32, max_position_embeddings=40, **both)
    ids = {"input_ids": tokens(7), "decoder_input_ids": tokens(5)}
    return BartForConditionalGeneration(config), ids


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=71, d_model=32, d_kv=8, d_ff=80, num_layers=2, num_heads=4)
    ids = {"input_ids": tokens(7), "decoder_input_ids": tokens(5)}
    return T5ForConditionalGeneration(config), ids


SIZES = {"vocab_size": 71, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=40)
    return BertForMaskedLM(config), {"input_ids": tokens()}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=71, n_positions=40, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config), {"input_ids": tokens()}


def qwen3() -> Made:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=12)), {"input_ids": tokens()}


def gemma2() -> Made:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, head_dim=12)), {"input_ids": tokens()}


def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, **HEADS, num_local_experts=5)
    return MixtralForCausalLM(config), {"input_ids": tokens()}


def deepseek() -> Made:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=24,
        n_routed_experts=6,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=20,
        kv_lora_rank=14,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=10,
    )
    return DeepseekV3ForCausalLM(config), {"input_ids": tokens()}


def mamba() -> Made:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=71, hidden_size=32, state_size=6, num_hidden_layers=2)
    return MambaForCausalLM(config), {"input_ids": tokens()}


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 80}
    both = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sides.items()}
    config = WhisperConfig(
        vocab_size=71,
        d_model=32,
        num_mel_bins=10,
        max_source_positions=12,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **both,
    )
    mel = {"input_features": torch.randn(2, 10, 24), "decoder_input_ids": tokens(5)}
    return WhisperForConditionalGeneration(config), mel


def wav2vec2() -> Made:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        **SIZES,
        num_attention_heads=4,
        conv_dim=(20, 20, 24),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
    )
    return Wav2Vec2ForCTC(config), {"input_values": torch.randn(2, 400)}


IMAGE = {"image_size": 16, "patch_size": 4}
TOWER = {"hidden_size": 24, "intermediate_size": 60, "num_hidden_layers": 2}


def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={**SIZES, "num_attention_heads": 4, "max_position_embeddings": 40},
        vision_config={**TOWER, **IMAGE, "num_attention_heads": 4},
        projection_dim=20,
    )
    pixels = torch.randn(2, 3, 16, 16)
    return CLIPModel(config), {"input_ids": tokens(), "pixel_values": pixels}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**TOWER, **IMAGE, num_attention_heads=4, num_labels=9)
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=9,
    )
    return SwinForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def llava() -> Made:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**TOWER, **IMAGE, num_attention_heads=4),
        text_config=LlamaConfig(**SIZES, **HEADS),
        image_token_index=70,
        image_token_id=70,
        vision_feature_layer=-1,
        image_seq_length=16,
    )
    ids = torch.cat([torch.full((2, 16), 70), tokens(5, 60)], 1)
    return Llava(config), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 24], depths=[2, 2], num_stages=2, num_labels=9)
    model = ConvNextForImageClassification(config)
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}


def neox() -> Made:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(**SIZES, num_attention_heads=4, max_position_embeddings=40)
    return GPTNeoXForCausalLM(config), {"input_ids": tokens()}
