"""What recording a long attention call costs, beside the call itself: times, and memory over what the call took."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tiled_attention as ta


class Attend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ta.attention(query, key, value, mask=ta.Causal())


def measured(name: str, function: Callable[[], Any]) -> Any:
    """Its result; prints its time, and by how much it raised the largest memory that the process has held."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    result = function()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{name:24} {seconds:7.3f} s  {(after - before) / 1024:+7.0f} MiB")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    inputs = [torch.randn(1, options.heads, options.length, 64) for _ in range(3)]
    model = Attend()

    def recorded(**choice: Any) -> ta.RecordedAttention:
        with ta.record_attention(model, **choice) as recording:
            model(*inputs)
        return recording[0]

    measured("attention", lambda: model(*inputs))
    measured("attention again", lambda: model(*inputs))
    call = measured("recorded", recorded)
    measured("recorded, rows=-1", lambda: recorded(rows=-1))
    measured("overview()", call.overview)
    measured("weights(rows=-1)", lambda: call.weights(rows=-1))
    print(f"kept: {call.nbytes / 2**20:.0f} MiB; all weights would be {options.heads * options.length**2 * 4 / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
