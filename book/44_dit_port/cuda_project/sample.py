"""Sample clips from a checkpoint: python sample.py --ckpt results/last.pt"""

import argparse

import torch

from diffusion import GraphedSampler, sample
from dist_utils import Timer, gpu_report
from model import build_model


def pick_device(name):
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def prepare(model, device):
    if device.type == "cpu":
        model = model.float()
    else:
        model = model.cuda()
    return model.eval()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ckpt", required=True)
    p.add_argument("--classes", type=int, nargs="+", default=list(range(12)))
    p.add_argument("--guidance", type=float, default=2.0)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--device", default="auto")
    p.add_argument("--half", action="store_true")
    p.add_argument("--graph", action="store_true")
    p.add_argument("--eval", action="store_true")
    p.add_argument("--out", default="samples.pt")
    args = p.parse_args()

    device = pick_device(args.device)
    if device.type != "cuda":
        print("warning: sampling without a GPU")
    model = build_model(device="cuda", half=args.half)
    options = {"map_location": "cuda", "weights_only": True}
    model.load_state_dict(torch.load(args.ckpt, **options)["ema"])
    model = prepare(model, device)
    labels = torch.tensor(args.classes).cuda()
    if args.graph:
        example = torch.randn(len(labels), 1, 8, 16, 16, device=device)
        model = GraphedSampler(model, example, torch.zeros(len(labels), device=device), labels)
    with Timer() as timer:
        clips = sample(model, labels, (1, 8, 16, 16), args.steps, args.guidance)
    print(f"{len(clips)} clips in {timer.seconds:.2f} s on {torch.cuda.get_device_name()}")
    print(gpu_report())
    torch.save(clips.cpu(), args.out)


if __name__ == "__main__":
    main()
