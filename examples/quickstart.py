"""A tour of tiled_attention in two minutes of reading. Every step checks itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiled_attention as ta


def check(name: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Prints the largest difference, and stops if it is above the tolerance."""
    difference = (actual - expected).abs().max().item()
    print(f"{name:60} largest difference {difference:.1e}")
    if not difference <= tolerance:
        raise SystemExit(f"{name}: expected a difference of at most {tolerance}, got {difference}")


def main() -> None:
    torch.manual_seed(0)
    # (batch, num_heads, seqlen, head_dim): 8 query heads share 2 key/value heads.
    query = torch.randn(2, 8, 100, 64, requires_grad=True)
    key, value = torch.randn(2, 2, 120, 64), torch.randn(2, 2, 120, 64)

    # The function of torch under the same name; is_causal is aligned to the top left there.
    out = ta.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    check("scaled_dot_product_attention", out, F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))

    # ta.Causal() is aligned to the bottom right: the last query sees the last key. Masks are values and combine.
    streaming = ta.Causal() & (ta.SlidingWindow(32, 0) | ta.Sinks(4))
    out = ta.attention(query, key, value, mask=streaming)
    visible = streaming.dense(100, 120)
    check("window with sinks", out, F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True))

    # A bias of any broadcastable shape, with its gradient, and no 8 x 100 x 120 tensor on the way.
    bias = torch.randn(8, 1, 120, requires_grad=True)
    peer_bias = bias.detach().clone().requires_grad_()
    ta.attention(query, key, value, bias=bias).square().sum().backward()
    peer = F.scaled_dot_product_attention(query, key, value, attn_mask=peer_bias.expand(8, 100, 120), enable_gqa=True)
    peer.square().sum().backward()
    assert bias.grad is not None and peer_bias.grad is not None
    check("gradient of a bias", bias.grad, peer_bias.grad, 1e-3)

    # Attention over two sets of keys, merged through the log-sum-exp: the same as over all of them.
    first, rest = slice(0, 50), slice(50, 120)
    parts = [ta.attention(query, key[:, :, part], value[:, :, part], return_lse=True) for part in (first, rest)]
    merged, _ = ta.merge_attention(*parts[0], *parts[1])
    check("merge_attention", merged, ta.attention(query, key, value))

    # Dropout is a function of the seed and the position: the mask can be asked for.
    torch.manual_seed(1)
    out = ta.attention(query, key, value, dropout_p=0.25)
    torch.manual_seed(1)
    kept = ta.dropout_mask(2, 8, 100, 120, 0.25)
    weights = torch.where(kept, ta.attention_weights(query, key) / 0.75, 0.0)
    check("dropout_mask", out, weights @ value.repeat_interleave(4, dim=1))

    # Linear attention: the whole sequence, and the same from a state and one more token.
    key, value = torch.randn(2, 8, 100, 64), torch.randn(2, 8, 100, 64)
    whole = ta.linear_attention(query, key, value, causal=True)
    _, state = ta.linear_attention(query[:, :, :99], key[:, :, :99], value[:, :, :99], causal=True, return_state=True)
    last, _ = ta.linear_attention_step(query[:, :, 99:], key[:, :, 99:], value[:, :, 99:], state)
    check("linear_attention_step", last, whole[:, :, 99:])

    # A module that reads the state_dict of nn.MultiheadAttention.
    stock = nn.MultiheadAttention(256, 8, batch_first=True)
    ours = ta.MultiheadAttention(256, 8, batch_first=True)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 50, 256)
    check("MultiheadAttention", ours(x, x, x)[0], stock(x, x, x)[0])

    # Models that exist already: everything that calls F.scaled_dot_product_attention or nn.MultiheadAttention runs here.
    layer = nn.TransformerEncoderLayer(256, 8, batch_first=True, dropout=0.0)
    expected = layer(x)
    with ta.override_sdpa():
        check("override_sdpa", layer(x), expected)


if __name__ == "__main__":
    main()
