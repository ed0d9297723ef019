"""Trains and samples with the finished port for a few steps; prints its numbers as JSON."""

import json
import os
import sys
import tempfile
from pathlib import Path

import shardbook as sb  # isort: skip  (first: it chooses the device)

PROJECT = Path(__file__).parents[2] / "book/44_dit_port/ported_project"


def rank(folder: str) -> tuple[list[float], str]:
    """(losses, device type) of three steps on this rank."""
    sys.path.insert(0, str(PROJECT))
    import train

    args = ["--steps", "3", "--batch", "4", "--out", folder]
    return train.train(train.parse(args)), sb.device().type


def main() -> None:
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        values = sb.run(rank, folder, world_size=ranks, timeout=300).values
        sys.path.insert(0, str(PROJECT))
        import sample

        out = os.path.join(folder, "samples.pt")
        ckpt = os.path.join(folder, "last.pt")
        clips = sample.main(
            ["--ckpt", ckpt, "--steps", "2", "--classes", "0", "5", "11", "--out", out]
        )
    print(json.dumps([values, clips.flatten()[::97].tolist()]))


if __name__ == "__main__":
    main()
