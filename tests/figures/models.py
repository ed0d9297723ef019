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


def dit() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    latent = torch.randn(2, 4, 8, 8)
    labels = torch.tensor([0, 3])
    return model, {
        "hidden_states": latent,
        "timestep": torch.tensor([1, 5]),
        "class_labels": labels,
    }


def unet() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=20,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    text = torch.randn(2, 5, 20)
    sample = torch.randn(2, 4, 16, 16)
    return model, {"sample": sample, "timestep": torch.tensor(3), "encoder_hidden_states": text}


def vae() -> Made:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
    )
    return model, {"sample": torch.randn(2, 3, 16, 16)}


def sd3() -> Made:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=20,
        caption_projection_dim=32,
        pooled_projection_dim=28,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 20),
        "pooled_projections": torch.randn(2, 28),
        "timestep": torch.tensor([1, 5]),
    }


def wan() -> Made:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        freq_dim=16,
        ffn_dim=60,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 3, 8, 8),
        "timestep": torch.tensor([1, 5]),
        "encoder_hidden_states": torch.randn(2, 5, 20),
    }


def flux() -> Made:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=12,
        num_attention_heads=2,
        joint_attention_dim=20,
        pooled_projection_dim=28,
        axes_dims_rope=(4, 4, 4),
        guidance_embeds=False,
    )
    return model, {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 5, 20),
        "pooled_projections": torch.randn(2, 28),
        "timestep": torch.tensor([0.1, 0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def cogvideox() -> Made:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=18,
        text_embed_dim=20,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=5,
    )
    return model, {
        "hidden_states": torch.randn(2, 3, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 20),
        "timestep": torch.tensor([1, 5]),
    }


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 24], depths=[2, 2], num_stages=2, num_labels=9)
    model = ConvNextForImageClassification(config)
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}


def neox() -> Made:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(**SIZES, num_attention_heads=4, max_position_embeddings=40)
    return GPTNeoXForCausalLM(config), {"input_ids": tokens()}


def pixart() -> Made:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=24,
        sample_size=8,
        patch_size=2,
        caption_channels=20,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 20),
        "timestep": torch.tensor([1, 5]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
