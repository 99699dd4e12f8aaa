"""An optimiser's step on bfloat16 weights with residuals, over that of fused AdamW on float32 weights: CPU or GPU seconds, bytes.

python benchmarks/residuals.py --weights 30 --device cpu
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trl.models.residuals import keep_residuals


def parameters(millions: int, dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Matrices of a million weights each, with gradients."""
    made = [nn.Parameter(torch.randn(1000, 1000, device=device).to(dtype)) for _ in range(millions)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def fused(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-5, fused=True)


def with_residuals(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], torch.optim.Optimizer]:
    def made(weights: Any) -> torch.optim.Optimizer:
        optimizer = make(weights)
        keep_residuals(optimizer)
        return optimizer

    return made


def eight_bits(weights: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(weights, lr=1e-5)


VARIANTS: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer]]] = {
    "float32, fused AdamW": (torch.float32, fused),
    "bf16+residual, fused AdamW": (torch.bfloat16, with_residuals(fused)),
    "bf16+residual, AdamW8bit": (torch.bfloat16, with_residuals(eight_bits)),
}


def step_seconds(optimizer: torch.optim.Optimizer, device: str) -> float:
    begin = time.perf_counter() if device == "cuda" else time.process_time()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter() - begin
    return time.process_time() - begin


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=int, default=30, help="millions")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    baseline = None
    for name, (dtype, make) in VARIANTS.items():
        weights = parameters(given.weights, dtype, given.device)
        optimizer = make(weights)
        optimizer.step()
        seconds = statistics.median(step_seconds(optimizer, given.device) for _ in range(given.steps))
        baseline = baseline or seconds
        tensors = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        size = sum(each.nbytes for each in {each.data_ptr(): each for each in tensors}.values())
        total = (size + sum(2 * each.nbytes for each in weights)) / sum(each.numel() for each in weights)
        print(f"{name:<30} {1e3 * seconds:8.1f} ms  {seconds / baseline:5.2f}  {total:5.2f} bytes per weight")


if __name__ == "__main__":
    main()
