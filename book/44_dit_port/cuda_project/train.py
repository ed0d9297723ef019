"""Train ClipDiT: torchrun --nproc-per-node 8 train.py"""

import argparse
import copy
import os

import torch
import torch.cuda.amp as amp
import torch.distributed as dist
from apex.optimizers import FusedAdam
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

from data import Prefetcher, loader
from diffusion import flow_loss
from dist_utils import (
    any_rank_failed,
    fast_math,
    free,
    mean_over_ranks,
    peak_memory,
    seed_everything,
    setup,
)
from model import build_model


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20000)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--ema", type=float, default=0.999)
    p.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="bf16")
    p.add_argument("--device", default="cuda")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="results")
    p.add_argument("--resume")
    return p.parse_args()


@torch.no_grad()
def update_ema(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p, 1 - decay)


def load(path, model, opt, device):
    where = {"cuda:0": f"cuda:{device}"}
    state = torch.load(path, map_location=where, weights_only=True)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    return state["step"]


def train(args):
    rank, world, device = setup()
    seed_everything(args.seed, rank)
    fast_math()
    model = build_model().to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    opt = FusedAdam(model.parameters(), lr=args.lr)
    step = load(args.resume, model, opt, device) if args.resume else 0
    net = torch.compile(model) if args.compile else model
    net = DDP(net, device_ids=[device])
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    scaler = amp.GradScaler(enabled=dtype is torch.float16)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    prof = profile(activities=activities) if args.profile else None

    losses = []
    while step < args.steps:
        for x, y in Prefetcher(loader(args.batch, world, rank, step), device):
            torch.cuda.nvtx.range_push("step")
            drop = torch.rand(len(y), device="cuda") < 0.1
            y = torch.where(drop, torch.full_like(y, 12), y)
            with amp.autocast(dtype=dtype, enabled=dtype is not torch.float32):
                loss = flow_loss(net, x, y)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            update_ema(ema, model, args.ema)
            torch.cuda.nvtx.range_pop()
            losses.append(loss.item())
            step += 1
            if step % 100 == 0:
                mean = mean_over_ranks(sum(losses[-100:]) / 100, device)
                if rank == 0:
                    print(f"step {step} loss {mean:.4f} peak {peak_memory():.2f} GiB", flush=True)
            if step >= args.steps:
                break
    if any_rank_failed(int(not torch.isfinite(loss)), device):
        raise SystemExit("a rank diverged")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        state = {"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(),
                 "step": step}
        torch.save(state, os.path.join(args.out, "last.pt"))
        if prof:
            print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=20))
    free()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(parse())
