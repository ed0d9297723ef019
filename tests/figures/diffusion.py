"""Tiny diffusion models, random weights, with the inputs of one forward pass."""

import torch

from .models import Made


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
