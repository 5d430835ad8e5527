"""Fills a model's parameters: from safetensors, from GGUF, or with random numbers.

Names and shapes are compared before anything is read; then tensors go one by one, in pieces, from the mapped file into
the parameter, so that memory never holds more than one piece above what stays.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ambidex.core.errors import InternalError, UnsupportedModelError, WeightsError
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.json_file import show
from ambidex.formats.locate import ModelSource, SourceKind
from ambidex.formats.safetensors import SafetensorsFile
from ambidex.formats.tensor_info import TensorInfo
from ambidex.kernels.cpu.quantized import GROUP_ROWS, QuantizedMatrix
from ambidex.kernels.reference.quantized import RECORD_BYTES
from ambidex.layers.norm import LayerNorm, RMSNorm
from ambidex.layers.split_matrix import SplitMatrix
from ambidex.models.gguf_names import find_hf_name, find_row_order
from ambidex.models.quantized import find_kept, names_of_parameters, put_in_place

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), sizes as they lie in the files."""

_CHUNK_BYTES: Final = 32 * 2**20  # of fp32; smaller pieces cost calls, larger ones memory
_NUM_SHOWN: Final = 8
DUMMY_SCORE_STD: Final = 4.5
"""Of scores (normal, natural logarithm) with dummy weights whose matrices of queries are whole and their own."""
_DUMMY_COMMON: Final = 0.5  # of a query's variance, the part that the heads of a group have in common
_DUMMY_STD: Final = 0.02  # what most families are initialised with
_DUMMY_NUMBERS: Final = 16 * 2**20  # of which divided matrices are made
_DUMMY_OFFSETS: Final = 2**16
_DUMMY_STEP: Final = 4099  # a prime
_DUMMY_RECORDS: Final = 2**15
_TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
_BASE_PREFIXES: Final[Mapping[str, str]] = {"falcon": "transformer."}
"""What stands before all names but lm_head's, and is missing where only the base model was saved; else `model.`."""
_IGNORED_ENDINGS: Final = ("rotary_emb.inv_freq", ".masked_bias")
"""Constants that old checkpoints store: the model computes its own."""
_IGNORED_GGUF: Final = ("rope_freqs.weight",)
"""Read into `RopeSpec.freq_factors`."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file, under the name that it has in the model.

    `read_rows(start, stop)` gives rows (indices of the first axis) as a new tensor on the CPU, `read_raw_rows` those of
    a GGUF file as they lie there, in the order of the model.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    read_rows: Callable[[int, int], Tensor]
    release: Callable[[], None]
    read_raw_rows: Callable[[int, int], NDArray[np.uint8]] | None = None


def load_weights(
    model: nn.Module,
    spec: ModelSpec,
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    keeps_quantized: bool = False,
    divided: Mapping[str, SplitMatrix] = MappingProxyType({}),
    progress: Progress | None = None,
) -> None:
    """Fill the parameters of `model`, whose names are those of the Hugging Face checkpoint.

    Args:
        divided: matrices in pieces that have taken parameters' places, by name.
        keeps_quantized: whether matrices of a GGUF file that have a native product as they are stored replace the
            model's parameters.
        device, dtype: where and as what parameters are made that are still on the meta device; the others stay where
            and what they are, and numbers are converted.
    Raises:
        WeightsError: tensors are missing, unexpected, doubled or of another shape, or do not fit into fp16; names them.
        ModelFileError: a file is corrupt or not there.
        UnsupportedModelError: numbers are stored in a format that is not read.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)} | divided.keys()
    checkpoint = _open_checkpoint(source, spec, names)
    _check_tensors(model, divided, checkpoint, source)
    packed = put_in_place(model, find_kept(spec) if keeps_quantized else {}, checkpoint)
    _allocate(model, device, dtype)
    done, total = 0, sum(stored.num_bytes for stored in checkpoint.values())
    filled: dict[nn.Parameter | QuantizedMatrix, str] = {}
    for stored in checkpoint.values():
        place = _find_place(model, stored.name, packed, divided)
        if isinstance(place, SplitMatrix):
            _fill(place, stored)
        elif place in filled:
            _compare(place, stored, first_name=filled[place])
        else:
            _fill(place, stored)
            filled[place] = stored.name
        stored.release()
        done += stored.num_bytes
        if progress is not None:
            progress(done, total)


def _find_place(
    model: nn.Module, name: str, packed: Mapping[str, QuantizedMatrix], divided: Mapping[str, SplitMatrix]
) -> nn.Parameter | QuantizedMatrix | SplitMatrix:
    if name in divided:
        return divided[name]
    return packed[name] if name in packed else model.get_parameter(name)


@torch.no_grad()
def make_dummy_weights(
    model: nn.Module,
    spec: ModelSpec,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    divided: Mapping[str, SplitMatrix] = MappingProxyType({}),
) -> None:
    """Fill the parameters with normal random numbers (standard deviation 0.02), those of norms with 1 (biases 0).

    Matrices of queries, where they are matrices of their own and whole, have larger ones: scores then spread by 4.5
    (normal, natural logarithm), so that some 4 % of the keys hold 99 % of a query's mass, and the heads of a group have
    half of their queries' variance in common, so that 12 % do so for some of four heads. With 0.02 for all, 75 % would,
    and methods that leave keys out had nothing to leave out. SmolLM2-135M, which reads English, needs 18 and 35 % (of
    its three heads) of 2,048 keys, 10 and 19 % of 8,192: a number that grows slowly, where here it is a share.

    The same seed gives the same numbers on the same device. Large pieces of divided matrices repeat the same numbers:
    making tens of gigabytes of them would take minutes.
    """
    _allocate(model, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, _DUMMY_STD, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("q_proj.weight"):  # of x with rms 1, q and k have std · sqrt(width): scores are their product
            _draw_heads_together(parameter, spec, generator)
            parameter.mul_(DUMMY_SCORE_STD / (_DUMMY_STD**2 * parameter.shape[1]))
    if divided:
        pieces = [piece.data for matrix in divided.values() for piece in matrix.pieces]
        if plain := [data for data in pieces if isinstance(data, Tensor)]:
            _fill_pieces(plain, generator, device, dtype)
        _fill_records([data for data in pieces if isinstance(data, QuantizedMatrix)], seed)
    for module in model.modules():
        if isinstance(module, (RMSNorm, LayerNorm)):
            for name, parameter in module.named_parameters():
                parameter.fill_(0.0 if name == "bias" else 1.0)


def _draw_heads_together(weight: Tensor, spec: ModelSpec, generator: torch.Generator) -> None:
    """Give the query heads of each KV head a part in common; every number is as likely as before."""
    heads = weight.view(spec.num_kv_heads, spec.group_size, spec.head_dim, -1)
    common = torch.empty_like(heads[:, :1]).normal_(0.0, _DUMMY_STD, generator=generator)
    heads.mul_(math.sqrt(1.0 - _DUMMY_COMMON)).add_(common, alpha=math.sqrt(_DUMMY_COMMON))


def _fill_records(matrices: Sequence[QuantizedMatrix], seed: int) -> None:
    """Fill packed matrices with random integers, again and again the same, and scales that make them as large."""
    for kind, record_bytes in RECORD_BYTES.items():
        records = torch.randint(
            0, 256, (_DUMMY_RECORDS, record_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        std = 74.0 if kind == "Q8_0" else 4.6  # of 8 and of 4 random bits
        scales = torch.full((GROUP_ROWS,), _DUMMY_STD / std, dtype=torch.float16)
        records[:, : 2 * GROUP_ROWS] = scales.view(torch.uint8)
        if kind == "Q4_1":
            records[:, 2 * GROUP_ROWS : 4 * GROUP_ROWS] = (-7.5 * scales).view(torch.uint8)
        on_device: dict[torch.device, Tensor] = {}
        for matrix in matrices:
            if matrix.kind != kind:
                continue
            flat = matrix.data.view(-1, record_bytes)
            some = on_device.setdefault(flat.device, records.to(flat.device))
            for start in range(0, len(flat), _DUMMY_RECORDS):
                part = flat[start : start + _DUMMY_RECORDS]
                part.copy_(some[: len(part)])


def _fill_pieces(
    pieces: Sequence[Tensor], generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> None:
    """Fill matrices [n, k] with the same random numbers again and again, each from another one on."""
    num = min(_DUMMY_NUMBERS, max(piece.numel() for piece in pieces)) + _DUMMY_OFFSETS
    numbers = torch.empty(num, dtype=dtype, device=device).normal_(0.0, _DUMMY_STD, generator=generator)
    on_device = {near: numbers.to(near) for near in {piece.device for piece in pieces}}
    for place, given in enumerate(pieces):
        piece = given if given.is_contiguous() else given.T  # columns that lie one after the other
        width = piece.shape[1]
        num_rows = max(1, min(piece.shape[0], (num - _DUMMY_OFFSETS) // width))
        first = place * _DUMMY_STEP % _DUMMY_OFFSETS
        rows = on_device[piece.device][first : first + num_rows * width].view(num_rows, width)
        for start in range(0, piece.shape[0], num_rows):
            part = piece[start : start + num_rows]
            part.copy_(rows[: len(part)])


def _open_checkpoint(source: ModelSource, spec: ModelSpec, names: Collection[str]) -> dict[str, _Stored]:
    """All tensors of the files, but those to ignore, by their names in the model."""
    if not source.files:
        raise WeightsError(
            f"{source.folder} has no .safetensors files (pickled weights are not read): download them, or use "
            "`load_format` dummy for random weights"
        )
    checkpoint: dict[str, _Stored] = {}
    for path in source.files:
        is_gguf = source.kind is SourceKind.GGUF
        for stored in _open_gguf(path, spec) if is_gguf else _open_safetensors(path, spec, names):
            if stored.name in checkpoint:
                raise WeightsError(f"{path}: tensor {show(stored.name)} is there a second time: remove the extra file")
            checkpoint[stored.name] = stored
    return checkpoint


def _open_safetensors(path: Path, spec: ModelSpec, names: Collection[str]) -> Iterator[_Stored]:
    file = SafetensorsFile(path)
    prefix = _BASE_PREFIXES.get(spec.architecture, "model.")
    for info in file.tensors.values():
        if not info.name.endswith(_IGNORED_ENDINGS):
            full_name = prefix + info.name
            yield _stored_in_safetensors(file, info, full_name if full_name in names else info.name)


def _stored_in_safetensors(file: SafetensorsFile, info: TensorInfo, name: str) -> _Stored:
    dtype = _TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise UnsupportedModelError(
            f"{file.path}: tensor {show(info.name)} has the dtype {info.dtype}: "
            f"supported are {', '.join(_TORCH_DTYPES)}"
        )

    def read_rows(start: int, stop: int) -> Tensor:
        row_bytes = info.num_bytes // info.shape[0]
        piece = bytearray(file.read(info.name)[start * row_bytes : stop * row_bytes])
        return torch.frombuffer(piece, dtype=dtype).view(-1, *info.shape[1:])

    return _Stored(name, info.shape, info.num_bytes, read_rows, lambda: file.release(info.name))


def _open_gguf(path: Path, spec: ModelSpec) -> Iterator[_Stored]:
    file = GGUFFile(path)
    for info in file.tensors.values():
        if info.name not in _IGNORED_GGUF:
            yield _stored_in_gguf(file, info, spec)


def _stored_in_gguf(file: GGUFFile, info: TensorInfo, spec: ModelSpec) -> _Stored:
    order = find_row_order(info.name, spec)

    def read_rows(start: int, stop: int) -> Tensor:
        if len(info.shape) == 1:
            values = file.dequantize(info.name)
            return torch.from_numpy(values if order is None else values[order])[start:stop]
        rows = slice(start, stop) if order is None else order[start:stop]
        return torch.from_numpy(file.dequantize_rows(info.name, rows)).view(-1, *info.shape[1:])

    def read_raw_rows(start: int, stop: int) -> NDArray[np.uint8]:
        return file.raw_rows(info.name, slice(start, stop) if order is None else order[start:stop])

    name = find_hf_name(info.name, spec) or info.name
    return _Stored(name, info.shape, info.num_bytes, read_rows, lambda: file.release(info.name), read_raw_rows)


def _check_tensors(
    model: nn.Module, divided: Mapping[str, SplitMatrix], checkpoint: Mapping[str, _Stored], source: ModelSource
) -> None:
    """A tied parameter has two names, of which one is enough."""
    names_of = names_of_parameters(model)
    shapes = {name: tuple(parameter.shape) for parameter, names in names_of.items() for name in names}
    shapes |= {name: matrix.shape for name, matrix in divided.items()}
    all_names = [*names_of.values(), *([name] for name in divided)]
    missing = [names[0] for names in all_names if not checkpoint.keys() & set(names)]
    unexpected = [show(name) for name in checkpoint if name not in shapes]
    misshaped = [
        f"{name} {list(stored.shape)} instead of {list(shapes[name])}"
        for name, stored in checkpoint.items()
        if name in shapes and stored.shape != shapes[name]
    ]
    faults = {"missing": missing, "unexpected": unexpected, "mis-shaped": misshaped}
    if any(faults.values()):
        listed = "; ".join(_list_names(kind, names) for kind, names in faults.items() if names)
        raise WeightsError(f"the weights of {source.name} do not fit its configuration: {listed}")


def _list_names(kind: str, names: list[str]) -> str:
    rest = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{len(names)} {kind} ({', '.join(names[:_NUM_SHOWN])}{rest})"


def _allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace parameters on the meta device by uninitialised ones; tied ones stay tied."""
    if stuck := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise InternalError(f"buffers {stuck} are on the meta device and are in no file")
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and parameter not in made:
                data = torch.empty(parameter.shape, device=device, dtype=dtype)
                made[parameter] = nn.Parameter(data, requires_grad=False)
            if parameter.is_meta:
                setattr(module, name, made[parameter])


def _fill(place: nn.Parameter | QuantizedMatrix | SplitMatrix, stored: _Stored) -> None:
    with torch.no_grad():
        for start, stop in _pieces(stored.shape):
            if isinstance(place, SplitMatrix) and place.kind is not None and stored.read_raw_rows is not None:
                place.pack(start, stored.read_raw_rows(start, stop))
            elif isinstance(place, SplitMatrix):
                for target, values in place.cut(start, stored.read_rows(start, stop)):
                    _write(target, values, stored.name)
            elif not isinstance(place, QuantizedMatrix):
                _write(place[start:stop], stored.read_rows(start, stop), stored.name)
            elif stored.read_raw_rows is not None:
                place.pack(start, stored.read_raw_rows(start, stop))


def _write(place: Tensor, values: Tensor, name: str) -> None:
    """Convert; what is finite in the file must be finite in the model, where fp16 has the smaller range."""
    place.copy_(values)
    if place.dtype != torch.float16 or values.dtype == torch.float16:
        return
    if not place.isfinite().all() and values.isfinite().all():
        raise WeightsError(
            f"{name} holds {values.abs().max().item():g}, beyond the 65504 of fp16: use `dtype` bf16 or `dtype` fp32"
        )


def _compare(place: nn.Parameter | QuantizedMatrix, stored: _Stored, *, first_name: str) -> None:
    """A tied parameter that the files hold twice must be the same twice."""
    for start, stop in _pieces(stored.shape):
        first = place.rows(torch.arange(start, stop)) if isinstance(place, QuantizedMatrix) else place[start:stop]
        if not torch.equal(first, stored.read_rows(start, stop).to(first.device, first.dtype)):
            raise WeightsError(
                f"{stored.name} differs from {first_name}, but the configuration ties them: set tie_word_embeddings "
                "to false"
            )


def _pieces(shape: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """Ranges of rows that are about a chunk each."""
    num_rows = max(1, _CHUNK_BYTES // (4 * math.prod(shape[1:])))
    return ((start, min(start + num_rows, shape[0])) for start in range(0, shape[0], num_rows))
