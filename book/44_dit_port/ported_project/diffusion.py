"""Flow matching, and the older DDPM schedule that some checkpoints were trained with."""

import numpy as np
import torch


def linear_betas(steps=1000):
    return np.linspace(1e-4, 2e-2, steps, dtype=np.float64)  # on the host, where float64 is fine


class DDPM:
    def __init__(self, steps=1000):
        cumprod = np.cumprod(1.0 - linear_betas(steps))
        self.alphas_cumprod = torch.from_numpy(cumprod).float()  # cast first, then move

    def coefficients(self, t, shape):
        a = self.alphas_cumprod.to(t.device)[t].view(-1, *[1] * (len(shape) - 1))
        return a.sqrt(), (1 - a).sqrt()

    def add_noise(self, x, noise, t):
        a, b = self.coefficients(t, x.shape)
        return a * x + b * noise


def flow_loss(model, x, y, generator=None):
    """Velocity matching; t = 0 is data, t = 1 is noise. Drawn on the CPU: the same everywhere."""
    noise = torch.randn(x.shape, generator=generator).to(x.device)
    t = torch.rand(x.shape[0], generator=generator).to(x.device)
    at = t.view(-1, 1, 1, 1, 1)
    pred = model((1 - at) * x + at * noise, t * 1000, y)
    return ((pred.float() - (noise - x)) ** 2).mean()


@torch.no_grad()
def sample(model, labels, shape, steps=20, guidance=1.0, null=12, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(labels), *shape, generator=generator).to(labels.device)
    for i in range(steps):
        t = torch.full((len(labels),), 1000 * (1 - i / steps), device=x.device)
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not torch.float32):
            v = model(x, t, labels)
            if guidance != 1.0:
                rest = model(x, t, torch.full_like(labels, null))
                v = rest + guidance * (v - rest)
        x = x - v.float() / steps
    return x
