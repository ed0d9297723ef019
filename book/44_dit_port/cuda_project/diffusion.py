"""Flow matching, and the older DDPM schedule that some checkpoints were trained with."""

import numpy as np
import torch


def linear_betas(steps=1000):
    return np.linspace(1e-4, 2e-2, steps, dtype=np.float64)


class DDPM:
    def __init__(self, steps=1000):
        self.betas = linear_betas(steps)
        self.alphas_cumprod = np.cumprod(1.0 - self.betas)

    def coefficients(self, t, shape):
        a = _extract(self.alphas_cumprod, t, shape)
        return a.sqrt(), (1 - a).sqrt()

    def add_noise(self, x, noise, t):
        a, b = self.coefficients(t, x.shape)
        return a * x + b * noise


def _extract(table, t, shape):
    values = torch.from_numpy(table).to(device=t.device)[t].float()
    return values.view(-1, *[1] * (len(shape) - 1)).expand(shape)


def flow_loss(model, x, y):
    """Velocity matching; t = 0 is data, t = 1 is noise."""
    noise = torch.randn_like(x)
    t = torch.cuda.FloatTensor(x.shape[0]).uniform_()
    at = t.view(-1, 1, 1, 1, 1)
    target = noise - x
    pred = model((1 - at) * x + at * noise, t * 1000, y)
    return ((pred.float() - target.float()) ** 2).mean()


@torch.no_grad()
def sample(model, labels, shape, steps=20, guidance=1.0, null=12, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(len(labels), *shape, generator=generator, device="cuda")
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64).cuda()
    for i in range(steps):
        t = torch.full((len(labels),), times[i].item() * 1000, device=x.device)
        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            v = model(x, t, labels)
            if guidance != 1.0:
                rest = model(x, t, torch.full_like(labels, null))
                v = rest + guidance * (v - rest)
        x = x + (times[i + 1] - times[i]).float() * v.float()
    return x


class GraphedSampler:
    """One Euler step captured into a graph; half the launch time on small batches."""

    def __init__(self, model, example, t, y):
        self.x, self.t, self.y = example.clone(), t.clone(), y.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(self.x, self.t, self.y)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = model(self.x, self.t, self.y)

    def __call__(self, x, t):
        self.x.copy_(x)
        self.t.copy_(t)
        self.graph.replay()
        return self.out.clone()
