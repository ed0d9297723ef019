"""Sample clips from a checkpoint: python sample.py --ckpt results/last.pt"""

import argparse
import time

import torch

from device import pick, synchronize
from diffusion import sample
from model import build_model, from_original


def main(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("--ckpt", required=True)
    p.add_argument("--classes", type=int, nargs="+", default=list(range(12)))
    p.add_argument("--guidance", type=float, default=2.0)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--half", action="store_true")
    p.add_argument("--out", default="samples.pt")
    args = p.parse_args(argv)

    device = pick()
    model = build_model(device)
    state = torch.load(args.ckpt, map_location=device, weights_only=True)["ema"]
    model.load_state_dict(from_original(state))
    model.eval()
    labels = torch.tensor(args.classes).to(device)
    dtype = torch.bfloat16 if args.half else torch.float32
    start = time.perf_counter()
    clips = sample(model, labels, (1, 8, 16, 16), args.steps, args.guidance, dtype=dtype)
    synchronize(device)
    print(f"{len(clips)} clips in {time.perf_counter() - start:.2f} s on {device.type}")
    torch.save(clips.cpu(), args.out)
    return clips.cpu()


if __name__ == "__main__":
    main()
