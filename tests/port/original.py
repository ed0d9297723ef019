"""Runs parts of the CUDA-only project, with stubs for the libraries that no NPU has.

Prints a JSON list of [part, error, file, line]: the last line of the project before it stopped.
"""

import json
import sys
import traceback
import types
from pathlib import Path

import shardbook as sb  # isort: skip  (first: it chooses the device)

import torch
from torch import nn

PROJECT = Path(__file__).parents[2] / "book/44_dit_port/cuda_project"


def stubs() -> None:
    """flash_attn and apex by name only, so that what lies behind their imports is reached."""
    for name, members in {
        "flash_attn": {"flash_attn_func": lambda q, k, v, **_: q},
        "apex": {},
        "apex.normalization": {"FusedLayerNorm": nn.LayerNorm},
        "apex.optimizers": {"FusedAdam": torch.optim.Adam},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)


def parts() -> dict:
    """What a user of the project would start, from the imports to one sampling step."""
    x, y = torch.zeros(2, 1, 8, 16, 16), torch.zeros(2, dtype=torch.int64)
    x, y = x.to(sb.device()), y.to(sb.device())
    t = torch.zeros(2, device=x.device)

    def call(module: str, name: str, *args):
        return lambda: getattr(__import__(module), name)(*args)

    def timed():
        with __import__("dist_utils").Timer():
            pass

    return {
        "import ops": lambda: __import__("ops"),
        "import train": lambda: __import__("train"),
        "stubs": stubs,
        "setup": call("dist_utils", "setup"),
        "timer": timed,
        "clock": call("dist_utils", "WallClock"),
        "report": call("dist_utils", "gpu_report"),
        "mean": call("dist_utils", "mean_over_ranks", 1.0, 0),
        "failed": call("dist_utils", "any_rank_failed", 1, 0),
        "model": call("model", "build_model"),
        "flow_loss": call("diffusion", "flow_loss", lambda x, t, y: x, x, y),
        "sample": call("diffusion", "sample", lambda x, t, y: x, y, (1, 8, 16, 16)),
        "graph": call("diffusion", "GraphedSampler", lambda x, t, y: x, x, t, y),
        "ddpm": lambda: __import__("diffusion").DDPM().add_noise(x, x, y),
        "time": lambda: __import__("model").TimestepEmbedder(96).to(x.device)(t),
        "rotary": call("model", "apply_rotary", x.new_zeros(1, 4, 2, 24), x.new_zeros(4, 12)),
        "prefetch": call("data", "Prefetcher", [(x, y)], 0),
    }


def main() -> None:
    sys.path.insert(0, str(PROJECT))
    out = []
    for name, part in parts().items():
        try:
            part()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            mine = [f for f in frames if Path(f.filename).parent == PROJECT]
            if not mine:
                raise
            where = mine[-1]
            out.append([name, type(error).__name__, Path(where.filename).name, where.lineno])
            for module in ("ops", "train", "model"):  # half imported: try again
                sys.modules.pop(module, None)
        else:
            out.append([name, "", "", 0])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
