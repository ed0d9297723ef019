"""A small variational autoencoder (arXiv 1312.6114): 16 x 16 pixels to a 4 x 4 latent and back."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """x plus two convolutions of it, each after a group norm."""

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class VAE(nn.Module):
    """Images [B, C, R, W] to latents [B, latent, R/4, W/4] and back.

    `encode` and `decode` work with standardised latents, once `standardise` has seen the data:
    a diffusion model mixes them with noise of variance 1.
    """

    def __init__(self, channels: int = 1, latent: int = 4, width: int = 16):
        super().__init__()
        w = width
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, w, 4, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(w, 2 * w, 4, stride=2, padding=1), Residual(2 * w),
            nn.GroupNorm(8, 2 * w), nn.SiLU(), nn.Conv2d(2 * w, 2 * latent, 3, padding=1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(latent, 2 * w, 3, padding=1), Residual(2 * w), nn.SiLU(),
            nn.ConvTranspose2d(2 * w, w, 4, stride=2, padding=1), nn.SiLU(),
            nn.ConvTranspose2d(w, channels, 4, stride=2, padding=1),
        )  # fmt: skip
        self.register_buffer("mean", torch.zeros(1, latent, 1, 1))
        self.register_buffer("std", torch.ones(1, latent, 1, 1))

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the latent's Gaussian, each [B, latent, R/4, W/4]."""
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        return mean, log_var.clamp(-20, 10)

    @torch.no_grad()
    def standardise(self, images: Tensor) -> None:
        """Remember mean and deviation of these images' latents, channel by channel."""
        mean, _ = self.posterior(images)
        self.mean.copy_(mean.mean((0, 2, 3), keepdim=True))
        self.std.copy_(mean.std((0, 2, 3), keepdim=True))

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return (self.posterior(x)[0] - self.mean) / self.std

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z * self.std + self.mean).clamp(-1, 1)


def vae_loss(vae: VAE, x: Tensor, noise: Tensor, kl_weight: float = 1e-3) -> Tensor:
    """Reconstruction plus a little of the KL divergence to N(0, 1), a scalar.

    noise is like the latent. The weight is small, as in latent diffusion (arXiv 2112.10752): the
    latent should be smooth, the diffusion model learns its distribution.
    """
    mean, log_var = vae.posterior(x)
    z = mean + noise * (0.5 * log_var).exp()
    y = vae.decoder(z)
    kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
    return F.mse_loss(y, x) + 0.2 * F.l1_loss(y, x) + kl_weight * kl
