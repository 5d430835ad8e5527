"""`Recording`: what a step computes on the CPU becomes a native program that is run again without Python or torch.

    recording = Recording()
    with recording:
        logits = model(...)        # computed as always, op by op
    recording.program.run()        # the same ops over the same memory

Native ops add themselves to the program (csrc/core/program.h). Torch's ops between them are caught by a dispatch mode:
views are taken as they are, the few that compute something are computed by native ops instead, and any other ends the
recording with an error that names it. So a program never lacks an op that the step had.

Results lie in memory that the recording owns. What nothing refers to any more is given out again, as it would be while
the ops run one after the other; so a program takes about what a layer's activations take, not all layers'.
"""

import ctypes
import math
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ambidex.core.errors import ShapeError, UnrecordableError
from ambidex.kernels.cpu import memory
from ambidex.kernels.cpu.native import check_loaded

with suppress(ImportError):  # `Program` says so when it is made
    from ambidex import _native

aten = torch.ops.aten

_ALIGNMENT: Final = 64
_MOST_WASTE: Final = 4
"""Times its own size that a result may take."""
_ELEMENTS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "int64"}
_NUMPY_DTYPES: Final = {
    torch.float32: np.float32,
    torch.int64: np.int64,
    torch.bfloat16: np.int16,
    torch.float16: np.int16,
}
_INT16_VIEWS: Final = (torch.bfloat16, torch.float16)


class Program:
    """A recorded step.

    Raises:
        NativeModuleError: the compiled module is missing or does not load.
    """

    def __init__(self) -> None:
        check_loaded()
        self.native = _native.Program()
        self._kept: list[object] = []

    @property
    def num_ops(self) -> int:
        """Ops that a run performs."""
        return self.native.num_ops

    def keep(self, *owners: object) -> None:
        """Keep what owns memory that the ops read or write."""
        self._kept.extend(owners)

    def run(self) -> None:
        """Perform all ops again, with the GIL released.

        Raises:
            ShapeError: what an op reads names something that is not there (a slot, an id, a block).
        """
        try:
            self.native.run()
        except ValueError as error:
            raise ShapeError(f"recorded step: {error}") from error


class Recording:
    """Records what its thread computes inside the `with` block; use it once, within `torch.inference_mode`.

    Args:
        arena: the memory of the results; programs that never run at the same time may share one.
    Raises:
        UnrecordableError: inside the block, at an op that has no native form.
    """

    def __init__(self, arena: "Arena") -> None:
        self.program = Program()
        self._arena = arena
        self._mode = _Mode(self._arena)

    def __enter__(self) -> "Recording":
        self.program.native.begin()
        memory.use_memory(self._arena)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here, as below
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        memory.use_memory(None)
        self.program.native.end()
        self.program.keep(self._arena)


class Arena:
    """Memory for the results of programs that never run at the same time; see `memory.Memory`.

    A buffer is free again once its array is gone, and serves any result that is not larger.
    """

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []  # ascending in size
        self._kept: dict[int, object] = {}
        self.num_bytes = 0

    def keep(self, owner: object) -> None:
        self._kept[id(owner)] = owner

    def new_array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        item = np.dtype(dtype)
        num_bytes = math.prod(shape) * item.itemsize
        if num_bytes == 0:
            return np.empty(shape, item)
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        place = bisect_left(self._free, size, key=len)
        is_fit = place < len(self._free) and len(self._free[place]) <= _MOST_WASTE * size
        buffer = self._free.pop(place) if is_fit else self._allocate(size)
        # numpy's views name the array at the end of a chain of arrays as their base. A memoryview ends the chain here,
        # so that each view of the result, however made, keeps this array alive.
        array = np.frombuffer(buffer.data[:num_bytes], item)
        weakref.finalize(array, self._give_back, buffer)
        result: npt.NDArray[np.generic] = array.reshape(shape)
        return result

    def alias(self, result: Tensor) -> Tensor:
        """The same fp32 numbers, in a tensor that does not keep their memory from being given out again.

        Whoever runs programs reads it before the next run.
        """
        num_bytes = result.numel() * result.element_size()
        memory_of = (ctypes.c_uint8 * num_bytes).from_address(result.data_ptr())
        return torch.from_numpy(np.frombuffer(memoryview(memory_of), np.float32).reshape(result.shape))

    def _give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        insort(self._free, buffer, key=len)

    def _allocate(self, size: int) -> npt.NDArray[np.uint8]:
        self.num_bytes += size
        raw = np.zeros(size + _ALIGNMENT, np.uint8)  # touched here, not in the first run
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + size]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes torch's ops by native ones."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._ops: dict[Any, Callable[..., Any]] = {
            aten.empty.memory_format: self._empty,
            aten.new_empty.default: lambda x, size, **options: self._empty(size, dtype=options.get("dtype") or x.dtype),
            aten.empty_like.default: lambda x, **options: self._empty(x.shape, dtype=options.get("dtype") or x.dtype),
            aten.clone.default: lambda x, **_: self._copied(x),
            aten._to_copy.default: self._to_copy,
            aten.copy_.default: self._copy_,
            aten.add.Tensor: self._add,
            aten.mul.Tensor: lambda a, b: self._binary("multiply", a, b),
            aten.cos.default: lambda x: self._unary("cos", x),
            aten.sin.default: lambda x: self._unary("sin", x),
            aten.relu.default: lambda x: self._unary("relu", x),
            aten.silu.default: lambda x: self._unary("silu", x),
            aten.gelu.default: self._gelu,
            aten.embedding.default: self._embedding,
            aten.native_layer_norm.default: self._layer_norm,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = self._ops.get(func)
        if op is not None:
            return op(*args, **kwargs)
        if func in _VIEWS:
            return func(*args, **kwargs)
        with self:  # an op that is made of others
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise UnrecordableError(f"torch's {func} has no native form")
        return result

    def _empty(self, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        kind = dtype or torch.float32
        if kind not in _NUMPY_DTYPES:
            raise UnrecordableError(f"tensors of {kind} have no native form")
        tensor = torch.from_numpy(self._arena.new_array(size, _NUMPY_DTYPES[kind]))
        return tensor.view(kind) if kind in _INT16_VIEWS else tensor

    def _unary(self, op: str, x: Tensor) -> Tensor:
        y = self._empty(x.shape)
        _native.unary(op, _array(x), _element(x), y.numpy())
        return y

    def _binary(self, op: str, a: Tensor, b: Tensor | float) -> Tensor:
        if not isinstance(b, Tensor):
            y = self._empty(a.shape)
            _native.scalar(op, _fp32(a), float(b), y.numpy())
            return y
        y = self._empty(np.broadcast_shapes(a.shape, b.shape))
        _native.binary(op, _fp32(a), _fp32(b), y.numpy())
        return y

    def _add(self, a: Tensor, b: Tensor | float, *, alpha: float = 1) -> Tensor:
        if alpha != 1:
            raise UnrecordableError("torch's add with a factor has no native form")
        if a.dtype == torch.int64 and isinstance(b, int) and a.is_contiguous():
            y = self._empty(a.shape, dtype=torch.int64)
            _native.add_int64(a.numpy(), b, y.numpy())
            return y
        return self._binary("add", a, b)

    def _gelu(self, x: Tensor, *, approximate: str = "none") -> Tensor:
        if approximate != "none":
            raise UnrecordableError(f"torch's gelu, approximated by {approximate}, has no native form")
        return self._unary("gelu", x)

    def _copied(self, x: Tensor) -> Tensor:
        """A contiguous copy."""
        y = self._empty(x.shape, dtype=x.dtype)
        _native.copy(_array(x), _array(y))
        return y

    def _to_copy(self, x: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        if dtype in (None, x.dtype):
            return self._copied(x)
        if dtype != torch.float32:
            raise UnrecordableError(f"a conversion from {x.dtype} to {dtype} has no native form")
        return self._unary("copy", x)

    def _copy_(self, to: Tensor, x: Tensor, _non_blocking: bool = False) -> Tensor:
        _native.copy(_array(x if x.dtype == to.dtype else self._to_copy(x, dtype=to.dtype)), _array(to))
        return to

    def _embedding(self, weight: Tensor, ids: Tensor, *_: object, **__: object) -> Tensor:
        y = self._empty((*ids.shape, weight.shape[1]), dtype=weight.dtype)
        _native.gather(_array(weight), ids.numpy().reshape(-1), _array(y.view(-1, weight.shape[1])))
        return y

    def _layer_norm(
        self, x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, None, None]:
        if len(shape) != 1 or not x.is_contiguous():
            raise UnrecordableError("torch's layer_norm has a native form for the last axis of contiguous tensors")
        y = self._empty(x.shape)
        _native.layer_norm(_fp32(x), _fp32(weight), None if bias is None else _fp32(bias), eps, y.numpy())
        return y, None, None


def _element(x: Tensor) -> str:
    name = _ELEMENTS.get(x.dtype)
    if name is None:
        raise UnrecordableError(f"tensors of {x.dtype} have no native form")
    return name


def _fp32(x: Tensor) -> npt.NDArray[np.float32]:
    if x.dtype != torch.float32:
        raise UnrecordableError(f"arithmetic on {x.dtype} has no native form")
    array: npt.NDArray[np.float32] = x.detach().numpy()
    return array


def _array(x: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory; 16-bit floats as integers, since numpy has no bf16."""
    _element(x)
    array: npt.NDArray[np.generic] = (x.view(torch.int16) if x.dtype in _INT16_VIEWS else x).detach().numpy()
    return array


_VIEWS: Final = frozenset(
    {
        aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default,
        aten.lift_fresh.default, aten.permute.default,
        aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.dim,
        aten.t.default, aten.transpose.int, aten.unbind.int, aten.unsqueeze.default, aten.view.default,
        aten.view.dtype, aten._unsafe_view.default, aten._reshape_alias.default,
    }
)  # fmt: skip
