"""What goes to ranks and comes back, and what code in a rank finds of multiprocessing."""

import multiprocessing
import pickle

import pytest
import torch

import shardbook as sb
from shardbook.ranks.pickles import dumps

pytestmark = pytest.mark.usefixtures("on_cpu")

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.int8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
]


def test_tensors_of_every_dtype_go_there_and_come_back():
    sent = [torch.tensor([0, 1, 1]).to(dtype) for dtype in DTYPES]

    def back(xs):
        return xs, torch.nn.Parameter(xs[0] * 2)

    ((came, parameter),) = sb.run(back, sent, world_size=1).values
    assert [x.dtype for x in came] == DTYPES
    for x, y in zip(sent, came, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert type(parameter) is torch.nn.Parameter and parameter.tolist() == [0, 2, 2]


def test_views_of_one_tensor_travel_as_one():
    x = torch.arange(1_000_000, dtype=torch.float32)
    packed = dumps([x[i : i + 1] for i in range(50)])
    assert 4_000_000 < len(packed) < 4_100_000
    views = pickle.loads(packed)
    assert [v.item() for v in views] == list(range(50))
    assert len({v.untyped_storage().data_ptr() for v in views}) == 1


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4).t()[1:, ::2],
        torch.tensor(3.0),
        torch.empty(0, 5),
        torch.arange(3).expand(2, 3),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
    ],
)
def test_a_tensor_keeps_what_it_is(x):
    y = pickle.loads(dumps(x))
    assert (y.shape, y.dtype, y.layout, y.device) == (x.shape, x.dtype, x.layout, x.device)
    assert (y.requires_grad, y.is_conj()) == (x.requires_grad, x.is_conj())
    if x.layout is torch.strided and not x.is_meta:
        assert y.stride() == x.stride() and torch.equal(x, y)


def test_what_is_set_on_a_tensor_comes_with_it():
    x = torch.ones(2)
    x.role = "weight"
    assert pickle.loads(dumps(x)).role == "weight"


def test_a_loader_in_a_rank_has_workers_as_in_the_notebook():
    class Squares(torch.utils.data.Dataset):  # only a forked worker can take it
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return float(i * i)

    def load():
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=4, num_workers=2, collate_fn=lambda batch: torch.tensor(batch)
        )
        return multiprocessing.get_start_method(), [b.tolist() for b in loader]

    method = multiprocessing.get_start_method()
    if method != "fork":
        pytest.skip(f"workers of a {method} take no local class, in the notebook neither")
    for found, batches in sb.run(load, world_size=2).values:
        assert found == method
        assert batches == [[0.0, 1.0, 4.0, 9.0], [16.0, 25.0, 36.0, 49.0]]
