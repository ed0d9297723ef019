"""Two ways to learn a denoiser, and how samples are drawn from each.

x is [B, ...] of any rank; a model is called ``model(x_t, t, labels)``. Flow matching's t runs from
0 (data) to 1 (noise), as in minRF. Other public code runs the other way: Step-Video's sampler goes
from noise at 0 to data at 1 unless it is told `reverse`. Ask before you load weights.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Model = Callable[[Tensor, Tensor, Tensor], Tensor]


def flow_matching_loss(model: Model, x: Tensor, labels: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Learn the velocity of the straight path from data to noise (arXiv 2209.03003), a scalar.

    x_t = (1 - t) x + t noise; the target is noise - x. t [B] in [0, 1].
    """
    at = t.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)  # [B, 1, …]
    x_t = (1 - at) * x + at * noise
    return F.mse_loss(model(x_t, t, labels), noise - x)


def ddpm_loss(
    model: Model, x: Tensor, labels: Tensor, noise: Tensor, t: Tensor, alphas_cumprod: Tensor
) -> Tensor:
    """Learn the noise (arXiv 2006.11239, eq. 14), a scalar. t [B] integer steps.

    x_t = sqrt(a_t) x + sqrt(1 - a_t) noise with a = alphas_cumprod [steps].
    """
    a = alphas_cumprod[t].view(-1, *[1] * (x.dim() - 1)).to(x.dtype)  # [B, 1, …]
    x_t = a.sqrt() * x + (1 - a).sqrt() * noise
    return F.mse_loss(model(x_t, t, labels), noise)


def guided(
    model: Model, x: Tensor, t: Tensor, labels: Tensor, guidance: float, null_label: int | None
) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598): uncond + g (cond - uncond), one batched call."""
    if guidance == 1.0:
        return model(x, t, labels)
    if null_label is None:
        raise ValueError(f"guidance of {guidance} needs null_label, the label for no condition")
    both = torch.cat([labels, torch.full_like(labels, null_label)])
    cond, uncond = model(torch.cat([x, x]), torch.cat([t, t]), both).chunk(2)
    return uncond + guidance * (cond - uncond)


@torch.no_grad()
def euler_sample(
    model: Model, noise: Tensor, labels: Tensor, steps: int,
    guidance: float = 1.0, null_label: int | None = None,
) -> Tensor:  # fmt: skip
    """Follow the learned velocity from t=1 (noise) to t=0 in equal steps; a tensor like noise."""
    x = noise
    for i in range(steps):
        t = torch.full((len(noise),), 1 - i / steps, dtype=torch.float32, device=noise.device)
        x = x - guided(model, x, t, labels, guidance, null_label) / steps
    return x


@torch.no_grad()
def ddim_sample(
    model: Model, noise: Tensor, labels: Tensor, steps: int, alphas_cumprod: Tensor,
    guidance: float = 1.0, null_label: int | None = None, clip: float = 4.0,
) -> Tensor:  # fmt: skip
    """DDIM without noise (arXiv 2010.02502) over `steps` of the DDPM's steps; a tensor like noise.

    The estimate of the clean x is clipped to [-clip, clip]: early steps divide by a small number.
    """
    last = len(alphas_cumprod) - 1
    times = torch.linspace(last, 0, steps).round().long().tolist()
    x = noise
    for now, after in zip(times, [*times[1:], None], strict=True):
        t = torch.full((len(noise),), now, dtype=torch.int64, device=noise.device)
        a = alphas_cumprod[now]
        a_next = alphas_cumprod[after] if after is not None else torch.ones_like(a)
        eps = guided(model, x, t, labels, guidance, null_label)
        clean = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-clip, clip)
        eps = (x - a.sqrt() * clean) / (1 - a).sqrt()
        x = a_next.sqrt() * clean + (1 - a_next).sqrt() * eps
    return x


def video_dpo_loss(
    model_win: Tensor, model_lose: Tensor, ref_win: Tensor, ref_lose: Tensor, beta: float
) -> Tensor:
    """Diffusion-DPO (arXiv 2311.12908) from per-sample squared errors [B], a scalar.

    The model should lower its error on the preferred sample more than the reference did, compared
    with the other one. The authors' code multiplies by half of its beta_dpo: ours is beta_dpo / 2.
    """
    advantage = (model_win - ref_win) - (model_lose - ref_lose)  # [B]
    return -F.logsigmoid(-beta * advantage).mean()
