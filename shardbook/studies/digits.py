"""Scikit-learn's digits, and how generated ones are judged.

Judged, not admired: a classifier says whether a sample is the digit that was asked for, and the
Fréchet distance says whether samples spread over its features as real images do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .train import seeded


def digits(train: int = 1400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(images, labels, test images, test labels): fp32 [N, 1, 16, 16] in [-1, 1], int64 [N].

    The 1,797 images of 8 x 8 pixels that ship in scikit-learn, doubled, in one fixed order.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1  # 0..16 -> -1..1
    images = F.interpolate(images, scale_factor=2, mode="bilinear")
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:train], labels[:train], images[train:], labels[train:]


class Classifier(nn.Module):
    """x [B, C, 16, 16] -> logits [B, classes]; `features` [B, 64] are what it sees before."""

    def __init__(self, channels: int = 1, classes: int = 10):
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 64), nn.ReLU())
        self.head = nn.Linear(64, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def train_classifier(images: Tensor, labels: Tensor, steps: int = 250, seed: int = 0) -> Classifier:
    """A classifier of these images [N, C, 16, 16], on their device; the same for the same seed."""
    classes = int(labels.max()) + 1
    model = seeded(lambda: Classifier(images.shape[1], classes), seed).to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pick = torch.randint(len(images), (128,), generator=generator).to(images.device)
        optimizer.zero_grad()
        F.cross_entropy(model(images[pick]), labels[pick]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def judge(classifier: Classifier, images: Tensor, labels: Tensor, real: Tensor) -> dict:
    """How good samples [N, C, 16, 16] of these labels are: {"accuracy": …, "frechet": …}.

    accuracy: the share that the classifier takes for its label; frechet: the Fréchet distance to
    the real images in the classifier's features.
    """
    predicted = classifier(images).argmax(1)
    return {
        "accuracy": (predicted == labels).float().mean().item(),
        "frechet": frechet_distance(classifier.features(images), classifier.features(real)),
    }


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Fréchet distance of two sets of features [N, D] and [M, D], taken as Gaussians.

    |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^1/2) with covariances A and B (arXiv 1706.08500). In
    float64 on the host. ValueError for fewer than two rows or another D.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(
            f"features are {tuple(a.shape)} and {tuple(b.shape)}: expected [N, D] and [M, D] "
            "with one D and at least two rows each"
        )
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T  # A^1/2
    # A^1/2 B A^1/2 is symmetric and has the eigenvalues of A B.
    product = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0)
    apart = (a.mean(0) - b.mean(0)).square().sum()
    distance = apart + cov_a.trace() + cov_b.trace() - 2 * product.sqrt().sum()
    return max(0.0, float(distance))  # rounding can leave -1e-8
