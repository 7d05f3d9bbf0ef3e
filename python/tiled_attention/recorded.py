"""What `record_attention` keeps of a call, and the weights that follow from it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from .additive_attention import forward_additive, weights_of_additive
from .arguments import TENSORS, Arguments, real_dtype
from .call import forward
from .derivatives import turned
from .weights import columns_last, weights_of

Indices = int | Iterable[int] | Tensor


class RecordedAttention:
    """One attention call of a recorded model: its weights, without dropout and without gradient.

    Attributes:
        name: path of the module that called, as of `named_modules()`, and "#2", "#3", ... behind it for its further calls.
        batch, num_heads, seqlen_q, seqlen_kv: sizes of the call; batch is the product of its leading dimensions.
        heads: the heads that were recorded, as `weights` counts them: all, or those that `record_attention(heads=)` chose.
        rows: the queries whose weights were kept, where `record_attention(rows=)` chose some; None: any can be asked for.
    """

    def __init__(self, name: str, call: Any, lse: Tensor | None, columns: int, heads: Any = None, rows: Any = None) -> None:
        """`call`: Arguments or AdditiveArguments without a value; lse of all its heads, or None."""
        query, key = call.query, call.key
        self.name = name
        self.batch = query.shape[:-3].numel()
        self.num_heads, self.seqlen_q = query.shape[-3:-1]
        self.seqlen_kv = key.shape[-2]
        self.heads = tuple(range(self.num_heads)) if heads is None else indices("heads", heads, self.num_heads, name)
        self.rows = None if rows is None else indices("rows", rows, self.seqlen_q, name)
        self._columns = columns
        if isinstance(call, Arguments):
            call = turned(call)._replace(key_table=None, query_table=None)
        if query.dtype != real_dtype(query.dtype):
            lse = None  # as it was rounded for the product with the values
        if heads is not None:
            call, lse = _of_heads(call, lse, self.heads)
        self._weights: Tensor | None = None
        self._lse: Tensor | None = lse
        self._call: Any = call
        self._versions: list[int | None] = []
        if self.rows is not None:
            self._weights = self._compute(call, self._all_lse(), self.rows)
            self._call = self._lse = None
        else:
            self._keep(call, lse)

    def weights(self, rows: Indices | None = None, heads: Indices | None = None) -> Tensor:
        """The probabilities, before dropout.

        Args:
            rows: indices of queries, negative ones count from the end; None: all that were recorded.
            heads: indices of heads, likewise.

        Returns:
            (batch, heads, rows, seqlen_kv), float32 (float64 for float64), in the order asked for. 0 where hidden; a query that sees no key
            has zeros; with sinks rows sum to less than 1. Computed on demand from the query and the keys, in O(rows x seqlen_kv) memory
            per head, unless `record_attention(rows=)` kept these rows.

        Raises:
            ValueError: naming rows or heads, where one is out of range or was not recorded.
            TypeError: where one is no integer.
            RuntimeError: where a mask or bias of the call was changed in place since.
        """
        chosen = self.heads if heads is None else self._among("heads", heads, self.num_heads, self.heads)
        places = [self.heads.index(head) for head in chosen]
        if self._weights is not None:
            assert self.rows is not None
            wanted = self.rows if rows is None else self._among("rows", rows, self.seqlen_q, self.rows)
            return self._weights[:, places][:, :, [self.rows.index(row) for row in wanted]]
        self._check_unchanged()
        call: Any = self._call
        lse: Any = self._all_lse()
        if chosen != self.heads:
            call, lse = _of_heads(call, lse, places)
        return self._compute(call, lse, None if rows is None else indices("rows", rows, self.seqlen_q, self.name))

    def overview(self, blocks: int = 128) -> Tensor:
        """Means of the weights over tiles, exact, in O(seqlen) memory: the picture of a map that is too large to be drawn.

        Tiles have ceil(seqlen_q / blocks) rows and ceil(seqlen_kv / blocks) columns, those at the ends what is left; a mean is over the
        pairs that a tile has. Weights of hidden pairs are 0, and count. One attention whose value has a column per block of keys gives the
        sum of each row over each block.

        Args:
            blocks: the most tiles in each direction, >= 1. Default 128.

        Returns:
            (batch, heads, blocks_q, blocks_kv), float32 (float64 for float64), heads as in `heads`; blocks_q = seqlen_q where that is less
            than `blocks`, and likewise blocks_kv.

        Raises:
            ValueError, TypeError: naming blocks.
            RuntimeError: where `record_attention(rows=)` kept rows only, or where a mask or bias of the call was changed in place since.
        """
        if isinstance(blocks, bool) or not isinstance(blocks, int):
            raise TypeError(f"blocks must be an integer >= 1, got {blocks!r}")
        if blocks < 1:
            raise ValueError(f"blocks must be an integer >= 1, got {blocks}")
        if self._weights is not None:
            raise RuntimeError(f"overview: {self.name!r} was recorded with rows=, which keeps those rows only: record it without rows=")
        self._check_unchanged()
        real = real_dtype(self._call.query.dtype)
        size_q, size_kv = (max(1, -(-n // blocks)) for n in (self.seqlen_q, self.seqlen_kv))
        blocks_q, blocks_kv = -(-self.seqlen_q // size_q), -(-self.seqlen_kv // size_kv)
        device = self._call.query.device
        block_of = (torch.arange(self.seqlen_kv, device=device) - self._columns) % max(1, self.seqlen_kv) // size_kv
        value = (block_of[:, None] == torch.arange(blocks_kv, device=device)).to(real)
        rows, keys = (_sizes(n, size).to(device, real) for n, size in ((self.seqlen_q, size_q), (self.seqlen_kv, size_kv)))
        result = torch.empty((self.batch, len(self.heads), blocks_q, blocks_kv), dtype=real, device=device)
        for place in range(len(self.heads)):  # one head at a time: (batch, seqlen_q, blocks_kv) in memory
            call, _ = _of_heads(self._call, None, [place])
            shares = _forward(call._replace(value=value.expand(*call.key.shape[:-1], blocks_kv)))[0]
            shares = shares.reshape(self.batch, self.seqlen_q, blocks_kv)
            whole = self.seqlen_q // size_q
            sums = result[:, place]
            sums[:, :whole] = shares[:, : whole * size_q].unflatten(1, (whole, size_q)).sum(2)
            if whole < blocks_q:
                sums[:, whole] = shares[:, whole * size_q :].sum(1)
            sums.div_(rows[:, None] * keys)
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this object holds; a dense mask or bias that the call was given counts, though the model may hold it too."""
        if self._weights is not None:
            return self._weights.untyped_storage().nbytes()
        tensors = [self._lse, *self._call[: TENSORS[type(self._call)]]]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if isinstance(x, Tensor)}
        return sum(storages.values())

    def __repr__(self) -> str:
        sizes = f"batch={self.batch}, num_heads={self.num_heads}, seqlen_q={self.seqlen_q}, seqlen_kv={self.seqlen_kv}"
        heads = "" if len(self.heads) == self.num_heads else f", heads={self.heads}"
        return f"RecordedAttention({self.name!r}, {sizes}{heads}{'' if self.rows is None else f', rows={self.rows}'})"

    def _keep(self, call: Any, lse: Tensor | None) -> None:
        """Copies what is of size O(seqlen), so that changes in place do not matter; of a dense mask or bias, the tensor and its version."""
        small = call.query.numel() + call.key.numel()
        count = TENSORS[type(call)]
        tensors = []
        for name, tensor in zip(call._fields, call[:count]):
            version: int | None = None
            if tensor is not None:
                tensor = tensor.detach()
                if name in ("block_rows", "block_tiles", "block_bits"):
                    pass  # of the mask, and never changed
                elif name in ("query", "key") or tensor.is_inference() or _span(tensor) <= small:
                    tensor = _copy(tensor)
                else:
                    version = tensor._version
            tensors.append(tensor)
            self._versions.append(version)
        self._call = type(call)(*tensors, *call[count:])
        self._lse = None if lse is None else lse.detach().clone()

    def _check_unchanged(self) -> None:
        for name, tensor, version in zip(self._call._fields, self._call, self._versions):
            if version is not None and tensor._version != version:
                raise RuntimeError(f"{name} of {self.name!r} was changed in place since the call: ask for the weights before that")

    def _all_lse(self) -> Tensor:
        """Of the heads that are kept; computed once."""
        if self._lse is None:
            self._lse = _forward(self._call._replace(value=self._call.key[..., :0]))[1]
        return self._lse

    def _compute(self, call: Any, lse: Tensor, rows: tuple[int, ...] | None) -> Tensor:
        index = None if rows is None else torch.tensor(rows, dtype=torch.int64, device=call.query.device)
        call = _widened(call)
        with _plainly(call.query.device):
            weights = weights_of(call, lse, rows=index) if isinstance(call, Arguments) else weights_of_additive(call, lse, index)
        return columns_last(weights.reshape(self.batch, *weights.shape[-3:]), self._columns)

    def _among(self, name: str, wanted: Indices, count: int, recorded: tuple[int, ...]) -> tuple[int, ...]:
        found = indices(name, wanted, count, self.name)
        missing = [index for index in found if index not in recorded]
        if missing:
            raise ValueError(f"{name}: expected some of the recorded {name} {recorded} of {self.name!r}, got {missing[0]}")
        return found


class Recording(Sequence[RecordedAttention]):
    """The attention calls of a recorded model, in the order in which they ended.

    Attributes:
        names: their names, in the same order.
    """

    def __init__(self) -> None:
        self._calls: list[RecordedAttention] = []

    @property
    def names(self) -> list[str]:
        return [call.name for call in self._calls]

    @overload
    def __getitem__(self, index: int) -> RecordedAttention: ...
    @overload
    def __getitem__(self, index: slice) -> list[RecordedAttention]: ...
    def __getitem__(self, index: int | slice) -> RecordedAttention | list[RecordedAttention]:
        return self._calls[index]

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[RecordedAttention]:
        return iter(self._calls)

    def __repr__(self) -> str:
        return "Recording([" + "".join(f"\n    {call!r}," for call in self._calls) + ("\n" if self._calls else "") + "])"


def integers(name: str, given: Any) -> tuple[int, ...]:
    """An integer or some of them, as a tuple. TypeError naming `name`."""
    if isinstance(given, Tensor):
        if given.dtype == torch.bool or given.dtype.is_floating_point or given.dtype.is_complex or given.dim() > 1:
            raise TypeError(f"{name}: expected an integer or integers, got a tensor of {given.dtype} {tuple(given.shape)}")
        given = given.tolist()
    if hasattr(given, "__index__"):
        given = (given,)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected an integer or integers, got {given!r}")
    given = tuple(given)
    for index in given:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"{name}: expected an integer or integers, got {index!r}")
    return tuple(operator.index(index) for index in given)


def indices(name: str, given: Any, count: int, where: str) -> tuple[int, ...]:
    """In [0, count), from indices of which negative ones count from the end. ValueError or TypeError naming `name`."""
    found = integers(name, given)
    for index in found:
        if not -count <= index < count:
            raise ValueError(f"{name}: expected indices in [{-count}, {count}) for {where!r}, got {index}")
    return tuple(index % count for index in found)


def _of_heads(call: Any, lse: Tensor | None, heads: Sequence[int]) -> tuple[Any, Tensor | None]:
    """The call and its lse for some of its query heads."""
    group = call.query.shape[-3] // max(1, call.key.shape[-3])
    index = torch.tensor(heads, dtype=torch.int64, device=call.query.device)
    changes = {"query": call.query.index_select(-3, index), "key": call.key.index_select(-3, index // max(1, group))}
    # Dimensions of heads, from the end, of what has one.
    for name, dim in (("mask", 3), ("bias", 3), ("alibi_slopes", 1), ("sinks", 1), ("block_rows", 3), ("score_weight", 2)):
        tensor = getattr(call, name, None)
        if tensor is not None and tensor.dim() >= dim and tensor.shape[-dim] > 1:
            changes[name] = tensor.index_select(-dim, index)
    return call._replace(**changes), None if lse is None else lse.index_select(-2, index)


def _widened(call: Any) -> Any:
    """Computed in the precision of its sums."""
    real = real_dtype(call.query.dtype)
    value = None if call.value is None else call.value.to(real)
    return call._replace(query=call.query.to(real), key=call.key.to(real), value=value)


def _forward(call: Any) -> tuple[Tensor, Tensor]:
    """(out, lse)"""
    call = _widened(call)
    with _plainly(call.query.device):
        return forward(call) if isinstance(call, Arguments) else forward_additive(call)


def _copy(tensor: Tensor) -> Tensor:
    """Without the repetitions of an expanded view, which the result is again."""
    once = tensor
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    return once.clone().expand(tensor.shape)


def _span(tensor: Tensor) -> int:
    """Elements of `_copy(tensor)` that are in memory."""
    return torch.Size(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride())).numel()


def _sizes(n: int, size: int) -> Tensor:
    """Of the blocks of n elements."""
    return torch.tensor([min(size, n - begin) for begin in range(0, n, size)])


@contextlib.contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """No gradients, no casts."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
