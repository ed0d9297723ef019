"""The small diffusion models, their data and their judge; the checks test the exercises."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardbook as sb
from shardbook.models.diffusion import ddim_sample, flow_matching_loss, guided
from shardbook.models.dit import DiT, from_tokens, to_tokens
from shardbook.models.rope3d import apply_rope, rope_3d
from shardbook.models.vae import VAE, vae_loss
from shardbook.studies import video
from shardbook.studies.digits import Classifier, digits, frechet_distance, judge
from shardbook.studies.preference import drift, pairs, prefer, squared_error
from shardbook.studies.shapes import DIRECTIONS, moving_shapes
from shardbook.studies.train import cosine, seeded, train


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_digits_are_doubled_and_in_one_fixed_order():
    images, labels, test_images, test_labels = digits()
    assert images.shape == (1400, 1, 16, 16) and test_images.shape == (397, 1, 16, 16)
    assert images.min() == -1 and images.max() == 1 and images.dtype == torch.float32
    assert torch.bincount(torch.cat([labels, test_labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip  # of scikit-learn's description of the data set
    again = digits()
    assert torch.equal(again[0], images) and torch.equal(again[3], test_labels)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 6), st.floats(-3, 3), st.floats(0.2, 4))
def test_frechet_distance_of_a_shift_and_a_scale(dim, shift, scale):
    """N(m, C) against its shift by s and scaling by k: |s|^2 + (k - 1)^2 tr C, in closed form."""
    a = normal(200, dim, seed=dim).double()
    centred = a - a.mean(0)
    b = centred * scale + a.mean(0) + shift
    trace = torch.cov(a.T).reshape(dim, dim).trace().item()
    want = dim * shift**2 + (scale - 1) ** 2 * trace
    if dim > 1:
        assert frechet_distance(a, b) == pytest.approx(want, rel=1e-6, abs=1e-5)


def test_frechet_distance_agrees_with_the_matrix_square_root():
    a, b = normal(80, 5, seed=1) @ normal(5, 5, seed=2), normal(60, 5, seed=3)
    cov_a, cov_b = torch.cov(a.double().T), torch.cov(b.double().T)
    root = torch.linalg.eigvals(cov_a @ cov_b).real.clamp(min=0).sqrt().sum()
    apart = (a.double().mean(0) - b.double().mean(0)).square().sum()
    want = (apart + cov_a.trace() + cov_b.trace() - 2 * root).item()
    assert frechet_distance(a, b) == pytest.approx(want, rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("shapes", [((5, 3), (5, 4)), ((1, 3), (5, 3)), ((5,), (5,))])
def test_frechet_distance_refuses_what_has_no_covariance(shapes):
    with pytest.raises(ValueError, match="at least two rows"):
        frechet_distance(*(torch.zeros(s) for s in shapes))


def test_the_judge_sees_wrong_classes():
    model = seeded(lambda: Classifier(1, 3), 0).eval()
    images = normal(40, 1, 16, 16)
    labels = model(images).argmax(1)
    assert judge(model, images, labels, images)["accuracy"] == 1
    assert judge(model, images, (labels + 1) % 3, images)["accuracy"] == 0


def test_moving_shapes_move_a_pixel_a_frame_and_never_wrap():
    videos, labels = moving_shapes(60, seed=3)
    assert videos.shape == (60, 1, 8, 16, 16) and set(videos.unique().tolist()) == {-1, 1}
    assert set(labels.tolist()) == set(range(12))
    assert torch.equal(moving_shapes(60, seed=3)[0], videos)
    for clip, label in zip(videos[:, 0], labels.tolist(), strict=True):
        step = list(DIRECTIONS.values())[label % 4]
        lit = (clip > 0).sum((1, 2))
        assert (lit == lit[0]).all()  # whole in every frame
        for before, after in itertools.pairwise(clip):
            assert torch.equal(before.roll(step, (0, 1)), after)
            rows, columns = (before > 0).nonzero().T
            assert rows.max() - rows.min() < 5 and columns.max() - columns.min() < 5
    with pytest.raises(ValueError, match="need 17 pixels"):
        moving_shapes(1, frames=13)


def test_vae_shapes_standardised_latents_and_loss():
    vae, x = seeded(VAE, 0), normal(12, 1, 16, 16, seed=1)
    assert vae.encode(x).shape == (12, 4, 4, 4) and vae.decode(vae.encode(x)).shape == x.shape
    before = vae.decode(vae.encode(x))
    vae.standardise(x)
    z = vae.encode(x)
    assert z.mean((0, 2, 3)).abs().max() < 1e-5 and (z.std((0, 2, 3)) - 1).abs().max() < 1e-5
    torch.testing.assert_close(vae.decode(z), before, rtol=1e-4, atol=1e-5)
    zero = torch.zeros(12, 4, 4, 4)
    mean, log_var = vae.posterior(x)
    kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).mean()
    difference = vae_loss(vae, x, zero, 1.0) - vae_loss(vae, x, zero, 0.0)
    assert difference.item() == pytest.approx(kl.item(), rel=1e-4)


def test_cosine_warms_up_and_ends_near_its_floor():
    factors = [cosine(i, 1000, 100) for i in range(1000)]
    assert factors[0] < 0.011 and max(factors) > 0.97 and factors[-1] == pytest.approx(0.02, 1e-3)
    assert factors[:90] == sorted(factors[:90]) and factors[120:] == sorted(factors[120:])[::-1]


def test_training_is_the_same_twice_and_averages_the_weights():
    def loss(model, generator):
        x = torch.randn(16, 3, generator=generator)
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    runs, seen = [], []
    for _ in range(2):
        model = seeded(lambda: torch.nn.Linear(3, 1), 0)
        report = lambda step, mean: seen.append((step, mean))  # noqa: E731
        average, losses = train(model, loss, 60, lr=0.05, warmup=5, report=report, every=20)
        runs.append((average.weight, losses))
        assert not torch.equal(average.weight, model.weight)
        assert not any(p.requires_grad for p in average.parameters())
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert runs[0][1][-1] < runs[0][1][0] / 10
    assert [step for step, _ in seen] == [20, 40, 60] * 2
    assert seen[0][1] == pytest.approx(sum(runs[0][1][:20]) / 20)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)
)
def test_patches_there_and_back(channels, frames, rows, columns, patch):
    grid = (frames, rows * patch, columns * patch)
    x = normal(2, channels, *grid)
    tokens = to_tokens(x, patch)
    assert tokens.shape == (2, frames * rows * columns, patch * patch * channels)
    assert torch.equal(from_tokens(tokens, grid, patch), x)
    image = x[:, :, 0]
    assert torch.equal(from_tokens(to_tokens(image, patch), grid[1:], patch), image)
    last = x[:, :, -1, -patch:, -patch:]  # the last token is the last patch of the last frame
    assert torch.equal(tokens[:, -1], last.permute(0, 2, 3, 1).flatten(1))


def test_rope_3d_is_the_complex_rotation_and_relative():
    positions = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(5))
    split, dim = (4, 6, 2), 12
    cos, sin = rope_3d(positions, dim, split)
    q = normal(2, 3, len(positions), dim)
    angles = torch.cat(
        [
            positions[:, a, None].double() * 10_000.0 ** (-torch.arange(0, n, 2).double() / n)
            for a, n in enumerate(split)
        ],
        dim=-1,
    )
    pairs = torch.view_as_complex(q.double().unflatten(-1, (-1, 2)).contiguous())
    want = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(apply_rope(q, cos, sin), want.float(), atol=1e-6, rtol=1e-5)
    moved = rope_3d(positions + torch.tensor([5, 2, 7]), dim, split)
    scores = [apply_rope(q, *t) @ apply_rope(q, *t).transpose(-1, -2) for t in ((cos, sin), moved)]
    torch.testing.assert_close(*scores, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("grid", "patch"), [((4, 6), 2), ((3, 4, 8), 4)])
def test_a_dit_of_images_and_of_videos(grid, patch):
    model = seeded(lambda: DiT(2, grid, 24, 2, 2, num_classes=5, patch=patch), 0)
    x, t, labels = normal(3, 2, *grid), torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0, 4, 5])
    assert not model(x, t, labels).any()  # adaLN-Zero: the last layer is zero at first
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.3 * normal(*p.shape, seed=i))
    out = model(x, t, labels)
    assert out.shape == x.shape
    one = model(x[1:2], t[1:2], labels[1:2])  # samples don't see each other
    torch.testing.assert_close(out[1:2], one, atol=1e-5, rtol=1e-4)
    assert (model(x, t, labels.roll(1)) - out).abs().max() > 1e-3
    assert (model(x, t.roll(1), labels) - out).abs().max() > 1e-3
    with pytest.raises(ValueError, match="patches"):
        DiT(2, (5, 5), 24, 1, 2, num_classes=3, patch=2)


def test_ddim_finds_the_data_of_a_perfect_model():
    """All data is one point: the exact noise is known, and every number of steps ends there."""
    alphas = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)
    point = normal(3, 2, seed=5)

    def model(x, t, labels):
        a = alphas[t][:, None]
        return (x - a.sqrt() * point) / (1 - a).sqrt()

    for steps in (1, 4, 20):
        made = ddim_sample(model, normal(3, 2), torch.zeros(3).long(), steps, alphas)
        torch.testing.assert_close(made, point, atol=1e-4, rtol=1e-4)


def test_guidance_extrapolates_and_needs_a_null_label():
    def model(x, t, labels):
        return x * 0 + labels[:, None].float()

    x, t, labels = normal(2, 3), torch.zeros(2), torch.tensor([1, 2])
    assert guided(model, x, t, labels, 3.0, 5).tolist() == [[-7.0] * 3, [-4.0] * 3]
    assert math.isclose(guided(model, x, t, labels, 1.0, None)[1, 0].item(), 2)
    with pytest.raises(ValueError, match="null_label"):
        guided(model, x, t, labels, 3.0, None)


def filled(model, seed=0):
    """Every parameter drawn: a new DiT answers with zeros."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.1 * normal(*p.shape, seed=seed + i))
    return model.eval()


def test_every_place_of_a_video_is_another_and_the_model_sees_it():
    places = video.Places((6, 3, 3), 64)
    table = places(torch.zeros(2, 54, 64))[0]
    assert (torch.cdist(table, table) + 9 * torch.eye(54)).min() > 0.5
    assert not torch.allclose(places(table[None]), table[None])
    model = filled(video.video_dit())
    x = normal(1, 1, *video.GRID)
    t, label = torch.tensor([0.5]), torch.tensor([video.NO_LABEL])
    out = model(x, t, label)
    assert out.shape == x.shape
    model.x_embedder[
        1
    ].table.zero_()  # with RoPE alone, what is no patch of the edge is like another
    assert (model(x, t, label) - out).abs().max() > 1e-3


def few_steps() -> tuple:
    weights, losses = video.learn(3, batch=8)
    labels = torch.tensor([0, 5, 12, 11])
    return weights, losses, video.draw(weights, labels, 2.0, seed=4)


def test_ranks_train_one_video_model_and_share_its_samples():
    first, second = sb.run(few_steps, world_size=2, timeout=120).values
    assert all(torch.equal(first[0][n], second[0][n]) for n in first[0])
    assert first[1] != second[1]  # each its own part of the batch
    both = torch.cat([first[2], second[2]])
    whole = sb.run(video.draw, first[0], torch.tensor([0, 5, 12, 11]), 2.0, 4, world_size=1)
    torch.testing.assert_close(both, whole.values[0], atol=1e-5, rtol=1e-4)


def test_the_video_judge_tells_shape_from_direction():
    videos, _ = video.clips(40, seed=2)
    model = seeded(lambda: Classifier(6, 12), 0).eval()
    found = model(videos[:, 0]).argmax(1)
    shape, direction = found // 4, found % 4
    scores = video.judge_videos(model, videos, (shape + 1) % 3 * 4 + direction, videos)
    assert (scores["shape"], scores["direction"], scores["both"]) == (0, 1, 0)
    scores = video.judge_videos(model, videos, shape * 4 + (direction + 1) % 4, videos)
    assert (scores["shape"], scores["direction"], scores["both"]) == (1, 0, 0)
    assert scores["frechet"] == pytest.approx(0, abs=1e-3)


def test_pairs_take_only_what_the_judge_is_sure_of():
    preferred = torch.tensor([True, True, False, False, True, False])
    sure = torch.tensor([True, False, True, True, True, False])
    wins, losses = pairs(preferred, sure, 50)
    assert set(wins.tolist()) == {0, 4} and set(losses.tolist()) == {2, 3}
    with pytest.raises(ValueError, match="0 winners and 4 losers"):
        pairs(preferred & ~sure, sure, 5)


def test_errors_by_video_are_those_of_the_training_loss():
    model = filled(video.video_dit())
    x, noise, t = (
        normal(3, 1, *video.GRID),
        normal(3, 1, *video.GRID, seed=1),
        torch.tensor([0.1, 0.5, 0.9]),
    )
    with torch.no_grad():
        errors = squared_error(model, x, 7, noise, t)
        want = flow_matching_loss(model, x, torch.full((3,), 7), noise, t)
    assert errors.shape == (3,)
    torch.testing.assert_close(errors.mean(), want)


def test_preferring_separates_the_pairs_and_leaves_the_reference_alone():
    reference = filled(video.video_dit())
    before = {n: p.clone() for n, p in reference.state_dict().items()}
    wins, losses = (video.clips(8, seed=s)[0] for s in (1, 2))
    runs = [prefer(reference, wins, losses, 12, 8, 100.0, 1e-3) for _ in range(2)]
    (model, curve), (_, again) = runs
    assert curve == again and curve[0] == pytest.approx(math.log(2), rel=1e-4)
    assert curve[-1] < curve[0] * 0.9
    assert all(torch.equal(before[n], p) for n, p in reference.state_dict().items())
    labels = torch.full((8,), 12)
    assert drift(reference, reference, wins, labels) == 0
    assert 0 < drift(model, reference, wins, labels) < 2
