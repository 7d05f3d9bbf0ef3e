"""A small model that uses the operators, as a package for C++: `python export_package.py --out FOLDER`, then run_package.

Writes model.pt2 (AOTInductor) and samples.pt (inputs of several lengths, and what the model makes of them in Python), and prints how far
the package, run from Python, is from the model.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import tiled_attention as ta

LENGTHS = (2, 24, 200)  # of the samples; the model is traced at another one


class Model(nn.Module):
    """Three sublayers with residual connections: streaming attention with 2 heads of key and value, causal linear attention, and
    `ta.MultiheadAttention`. (batch, seqlen, dim) -> (batch, seqlen, dim)."""

    def __init__(self, dim: int = 64, num_heads: int = 4, num_heads_kv: int = 2) -> None:
        super().__init__()
        head_dim = dim // num_heads
        self.heads = (num_heads, num_heads_kv, num_heads_kv)
        self.widths = [heads * head_dim for heads in self.heads]
        self.streaming = nn.Linear(dim, sum(self.widths))
        self.linear = nn.Linear(dim, 3 * dim)
        self.whole = ta.MultiheadAttention(dim, num_heads, batch_first=True)
        self.mask = ta.Causal() & (ta.SlidingWindow(16, 0) | ta.Sinks(2))
        self.rotary = ta.RotaryEmbedding(head_dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.streaming(x).split(self.widths, -1)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part, heads in zip(parts, self.heads))
        x = x + ta.attention(query, key, value, mask=self.mask, rotary=self.rotary).transpose(1, 2).flatten(2)
        query, key, value = (part.unflatten(-1, (self.heads[0], -1)).transpose(1, 2) for part in self.linear(x).chunk(3, -1))
        x = x + ta.linear_attention(query, key, value, causal=True).transpose(1, 2).flatten(2)
        return x + self.whole(x, x, x, need_weights=False)[0]


def export(out: Path) -> float:
    """Writes model.pt2 and samples.pt into the folder. Returns the largest difference between the package and the model."""
    torch.manual_seed(0)
    model = Model().eval()
    with torch.no_grad():
        seqlen = torch.export.Dim("seqlen", min=2, max=4096)
        program = torch.export.export(model, (torch.randn(3, 40, 64),), dynamic_shapes=({1: seqlen},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(out / "model.pt2"))
        inputs = [torch.randn(3, length, 64) for length in LENGTHS]
        samples = [(x, model(x)) for x in inputs]
        torch.save(samples, out / "samples.pt")
        compiled = torch._inductor.aoti_load_package(package)
        return max((compiled(x) - expected).abs().max().item() for x, expected in samples)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the two files (default: %(default)s)")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    print(f"{out / 'model.pt2'}, {out / 'samples.pt'}: largest difference {export(out):.1e}")


if __name__ == "__main__":
    main()
