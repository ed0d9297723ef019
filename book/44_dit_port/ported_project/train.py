"""Train ClipDiT: torchrun --nproc-per-node 8 train.py"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from data import loader
from device import peak_memory, setup, synchronize
from diffusion import flow_loss
from model import build_model, from_original


def parse(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20000)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--ema", type=float, default=0.999)
    p.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="results")
    p.add_argument("--resume")
    return p.parse_args(argv)


@torch.no_grad()
def update_ema(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters(), strict=True):
        e.lerp_(p, 1 - decay)


def load(path, model, opt, device):
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(from_original(state["model"]))
    opt.load_state_dict(state["opt"])
    return state["step"]


def train(args):
    """The losses of this rank."""
    rank, world, device = setup()
    torch.manual_seed(args.seed)  # the same weights on every rank and device
    model = build_model("cpu").to(device)
    noise = torch.Generator().manual_seed(args.seed + 1000 * (rank + 1))
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    step = load(args.resume, model, opt, device) if args.resume else 0
    net = DDP(model)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    losses = []
    while step < args.steps:
        for x, y in loader(args.batch, world, rank, step):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            drop = (torch.rand(len(y), generator=noise) < 0.1).to(device)
            y = torch.where(drop, torch.full_like(y, 12), y)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
                loss = flow_loss(net, x, y, noise)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            update_ema(ema, model, args.ema)
            losses.append(loss.item())
            step += 1
            if step % 100 == 0:
                mean = torch.tensor(sum(losses[-100:]) / 100, device=device)
                dist.all_reduce(mean)
                if rank == 0:
                    peak = peak_memory(device)
                    print(f"step {step} loss {mean.item() / world:.4f} peak {peak:.2f} GiB")
            if step >= args.steps:
                break
    failed = torch.tensor(int(not torch.isfinite(loss)), device=device, dtype=torch.int32)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failed.item():
        raise SystemExit("a rank diverged")
    synchronize(device)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        state = {"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}
        torch.save(state | {"step": step}, os.path.join(args.out, "last.pt"))
    dist.barrier()
    return losses


if __name__ == "__main__":
    train(parse())
    dist.destroy_process_group()
