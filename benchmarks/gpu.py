"""The first-order table on an accelerator: launches, bytes, host synchronisations, and times where there is one.

    python benchmarks/gpu.py

On a machine without an accelerator the counted part is printed: launches, copies and allocations per step by fake tensors,
beside torch's foreach and fused forms, and the time that the bytes take at the bandwidth of common cards.
"""

from __future__ import annotations

import torch

from moduli.testing._gpu import count_step, name_device, report

CARDS = {"A100 80 GB": 2039, "H100 SXM": 3350, "MI300X": 5300, "RTX 4090": 1008, "L4": 300}  # GB/s
SHAPES = {"4 of 2048x2048": [(2048, 2048)] * 4, "100 of 64x64": [(64, 64)] * 100}


def torch_fused(params):
    optimizer = torch.optim.AdamW(params, fused=True)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return step


def expected() -> None:
    print(
        "\nexpected milliseconds per step of clip + Adam + decay + lr, by bytes over bandwidth (32 bytes per element):"
    )
    print(f"  {'':12}" + "".join(f"{card:>14}" for card in CARDS))
    for label, elements in (("10 M", 10e6), ("124 M", 124e6), ("1.5 B", 1.5e9)):
        times = "".join(f"{32 * elements / (bandwidth * 1e9) * 1e3:>14.3f}" for bandwidth in CARDS.values())
        print(f"  {label:12}{times}")
    print("  torch's fused AdamW with clipping moves 40 bytes: the clipped gradients are written and read again.")


def main() -> None:
    report()
    if name_device() is None:
        print("\ntorch, fused, counted as above:")
        for name, shapes in SHAPES.items():
            cost, _ = count_step(torch_fused, shapes, "foreach")
            print(
                f"  {name:24}{len(cost.launches):>4} launches, {len(cost.copies)} copies, {cost.allocated} allocations"
            )
    expected()


if __name__ == "__main__":
    main()
