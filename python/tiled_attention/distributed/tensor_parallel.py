"""Tensor-parallel `MultiheadAttention`: its heads over the ranks of a mesh, as a style for parallelize_module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..convert import ConvertedMultiheadAttention
from ..multihead_attention import Columns, InProjection, MultiheadAttention, check_arguments, heads_attention, merge_masks


class HeadwiseParallel(ParallelStyle):
    """Divides a `ta.MultiheadAttention` by heads over a mesh of one dimension, for `torch.distributed.tensor.parallel.parallelize_module`.

    The projections of query, key and value are divided by columns, `out_proj` by rows, so that a rank computes its heads alone: forward is
    followed by one all-reduce of the output, backward by one of the gradient of each distinct input (of one, in self-attention). Weights,
    where they are asked for, are gathered besides. Results are those of the module before. With dropout all ranks must draw from the same
    `torch.manual_seed`; they drop what one process would.

    Parameters become DTensors under their names; `full_tensor()` of one is the parameter before. `in_proj_weight` and `in_proj_bias`, which
    hold the projections of query, key and value one behind the other, get a dimension for these, (3, embed_dim, embed_dim) and (3,
    embed_dim), of which the second is divided. The values of rank 0 are taken. FSDP2 may shard the result over another mesh dimension.

    Args:
        input_layouts: how inputs that are plain tensors lie on the mesh: `Replicate()`, the same on all ranks, or `Shard(dim)`, then they
            are gathered. Default `Replicate()`.
        output_layouts: how the output is to lie: `Replicate()`, by an all-reduce, or `Shard(dim)`, by a reduce-scatter. Default
            `Replicate()`.
        use_local_output: return the local plain tensor rather than a DTensor. Default True.

    Raises:
        TypeError: where the module is no `ta.MultiheadAttention` (`ta.convert` makes one of an `nn.MultiheadAttention`).
        ValueError: for a mesh of several dimensions, or whose size does not divide the number of heads.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MultiheadAttention) or type(module) not in (MultiheadAttention, ConvertedMultiheadAttention):
            raise TypeError(f"HeadwiseParallel divides a tiled_attention.MultiheadAttention, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh must have one dimension, got {tuple(device_mesh.shape)}: take the part for tensor parallelism")
        size = device_mesh.size()
        if module.num_heads % size:
            raise ValueError(f"num_heads must be a multiple of the {size} ranks of the mesh, got {module.num_heads}")
        for name, shape, dim in (
            ("in_proj_weight", (3, module.embed_dim, module.embed_dim), 1),
            ("in_proj_bias", (3, module.embed_dim), 1),
            ("q_proj_weight", (module.embed_dim, module.embed_dim), 0),
            ("k_proj_weight", (module.embed_dim, module.kdim), 0),
            ("v_proj_weight", (module.embed_dim, module.vdim), 0),
            ("bias_k", (1, 1, module.embed_dim), 2),
            ("bias_v", (1, 1, module.embed_dim), 2),
        ):
            parameter = getattr(module, name)
            if parameter is not None:
                shards = distribute_tensor(parameter.detach().view(shape), device_mesh, [Shard(dim)], src_data_rank=self.src_data_rank)
                module.register_parameter(name, nn.Parameter(shards, requires_grad=parameter.requires_grad))
        rows = RowwiseParallel(output_layouts=self.output_layouts, use_local_output=self.use_local_output)
        rows.src_data_rank = self.src_data_rank
        out_proj: nn.Module = module.out_proj
        parallelize_module(out_proj, device_mesh, rows)
        module.__class__ = HeadwiseMultiheadAttention
        module.input_layouts, module.mesh = self.input_layouts, device_mesh  # type: ignore[assignment]
        return module


class HeadwiseMultiheadAttention(MultiheadAttention):
    """What `HeadwiseParallel` makes of a `MultiheadAttention`: the same arguments and results, parameters divided by heads."""

    input_layouts: Placement
    mesh: DeviceMesh

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `MultiheadAttention.forward`, but for nested tensors, which are a ValueError. Masks are whole and the same on all ranks."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("query, key, value: expected dense tensors in a tensor-parallel module, got nested ones")
        whole: dict[int, Tensor] = {}
        for x in (query, key, value):
            if id(x) not in whole:  # one all-reduce of its gradient, however often it is used
                whole[id(x)] = self._gathered(x)
        query, key, value = (whole[id(x)] for x in (query, key, value))
        check_arguments(
            query, key, value, self.embed_dim, self.kdim, self.vdim, self.num_heads, key_padding_mask, attn_mask, self.batch_first
        )
        batch = None if query.dim() == 2 else query.shape[0 if self.batch_first else 1]
        mask, bias = merge_masks(attn_mask, key_padding_mask, batch, self.num_heads, query.dtype)

        order = (1, 0, 2) if batch is None else (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        back = (1, 0, 2) if batch is None else (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        heads = self._in_projection(query is key is value).project(query, key, value, self.num_heads // self.mesh.size())
        by_heads = [DTensor.from_local(x.permute(order), self.mesh, [Shard(query.dim() - 2)], run_check=False) for x in heads]
        out, weights = heads_attention(
            *by_heads,
            mask=self._everywhere(mask),
            bias=self._everywhere(bias),
            is_causal=is_causal,
            columns=Columns(self.bias_k, self.bias_v, self.add_zero_attn),
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
            average_weights=average_attn_weights,
        )
        local: Tensor = out.to_local()  # type: ignore[attr-defined]
        merged = self.out_proj(local.permute(back).flatten(-2))
        return merged, None if weights is None else weights.full_tensor()  # type: ignore[attr-defined]

    def _gathered(self, x: Tensor) -> Tensor:
        """`x` whole on each rank; the gradients that the ranks have of it are summed."""
        given = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [self.input_layouts], run_check=False)
        return given.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _everywhere(self, x: Any) -> Any:
        return x if x is None or isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)

    def _in_projection(self, is_one: bool) -> InProjection:
        bias = None if self.in_proj_bias is None else _local(self.in_proj_bias).flatten()
        if self.in_proj_weight is None:
            return InProjection(None, _local(self.q_proj_weight), _local(self.k_proj_weight), _local(self.v_proj_weight), bias)
        weights: Any = _local(self.in_proj_weight)  # (3, embed_dim / ranks, embed_dim)
        if is_one:
            return InProjection(weights.flatten(0, 1), None, None, None, bias)
        return InProjection(None, weights[0], weights[1], weights[2], bias)


def _local(parameter: Any) -> Any:
    return None if parameter is None else parameter.to_local()
