"""FlashAttention in plain torch beside SDPA's MATH path, forward, on one thread, in one run.

    python -m benchmarks.attention [--seq 2048]

Both compute the same; the ratio is the price of readable tiles. The limit is 4.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardbook.attention.flash import flash_attention_forward

LIMIT = 4.0


def seconds(run, repeat: int) -> float:
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, args.seq, 64, generator=generator) for _ in range(3))
    worst = 0.0
    for causal in (False, True):
        with sdpa_kernel(SDPBackend.MATH):
            plain = seconds(
                lambda c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c), args.repeat
            )
        ours = seconds(lambda c=causal: flash_attention_forward(q, k, v, c), args.repeat)
        worst = max(worst, ours / plain)
        name = "causal" if causal else "full  "
        times = f"MATH {plain * 1e3:7.1f} ms   flash {ours * 1e3:7.1f} ms"
        print(f"{name}  {times}   ratio {ours / plain:.2f}")
    print(f"limit {LIMIT}: {'holds' if worst <= LIMIT else 'DOES NOT HOLD'}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
