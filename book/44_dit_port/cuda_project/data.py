"""Moving shapes: 3 shapes x 4 directions, 8 frames of 16 x 16."""

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SHAPES, DIRECTIONS = 3, 4


def draw(shape, direction, start, frames=8, size=16):
    clip = -torch.ones(1, frames, size, size)
    dy, dx = [(0, 1), (0, -1), (1, 0), (-1, 0)][direction]
    row, col = start
    for f in range(frames):
        r, c = row + dy * f, col + dx * f
        for i in range(4):
            for j in range(4):
                edge = i in (0, 3) or j in (0, 3)
                full = [True, edge, i == j or i + j == 3][shape]
                rr, cc = r + i, (c + j) % size
                if full and 0 <= rr < size:
                    clip[0, f, rr, cc] = 1.0
    return clip


class MovingShapes(Dataset):
    def __init__(self, length=4096, seed=0):
        self.length, self.seed = length, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed * 100_003 + index)
        shape = int(torch.randint(SHAPES, (1,), generator=g))
        direction = int(torch.randint(DIRECTIONS, (1,), generator=g))
        row = int(torch.randint(2, 10, (1,), generator=g))
        col = int(torch.randint(16, (1,), generator=g))
        if direction == 2:
            row = min(row, 4)
        if direction == 3:
            row = max(row, 8)
        return draw(shape, direction, (row, col)), shape * DIRECTIONS + direction


def loader(batch, world, rank, seed=0):
    data = MovingShapes(seed=seed)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=seed)
    return DataLoader(
        data, batch, sampler=sampler, num_workers=2, pin_memory=True, pin_memory_device="cuda",
        drop_last=True, multiprocessing_context=torch.multiprocessing.get_context("fork"),
    )


class Prefetcher:
    """Copies the next batch while this one is computed."""

    def __init__(self, batches, device):
        self.batches, self.device = iter(batches), device
        self.stream = torch.cuda.Stream(device)
        self.preload()

    def preload(self):
        try:
            x, y = next(self.batches)
        except StopIteration:
            self.next = None
            return
        with torch.cuda.stream(self.stream):
            self.next = x.cuda(non_blocking=True), y.cuda(non_blocking=True)

    def __iter__(self):
        while self.next is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            self.preload()
            yield batch
