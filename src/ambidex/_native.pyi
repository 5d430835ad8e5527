"""The compiled module (csrc/bind/module.cpp). Use it through `ambidex.kernels.cpu.native`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def isa() -> str:
    """The fastest of `available_isas()`, or of those up to `AMBIDEX_MAX_ISA`; ops use it unless told otherwise.

    Raises:
        ValueError: that variable names none.
    """

def available_isas() -> list[str]:
    """The instruction sets that this machine runs, slowest first: of `generic`, `avx2`, `avx512`."""

def merge_states(
    out_a: npt.NDArray[np.float32],
    lse_a: npt.NDArray[np.float32],
    out_b: npt.NDArray[np.float32],
    lse_b: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    lse: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """Join partial attentions over disjoint sets of keys, into `out` and `lse`.

    Args:
        out_a, out_b: [R, D] fp32, contiguous; not read in rows whose lse is −inf.
        lse_a, lse_b: [R] fp32, natural log, −inf where no key was seen.
        out, lse: where the result goes, [R, D] and [R] fp32; may be the inputs themselves.
        isa: one of `available_isas()`; None for the fastest.
    Raises:
        TypeError: an array is not fp32, not contiguous, read-only where written, or has another number of axes.
        ValueError: shapes differ, arrays overlap in part, or `isa` does not run here.
    Cost: moves 3 * R * D floats in the calling thread, with the GIL released; allocates nothing.
    """

def exp2(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], *, isa: str | None = None) -> None:
    """2^x of each number, as the attention kernels compute it, for tests: x [n], y [n]."""

def rms_norm(
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    eps: float,
    y: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, into y of the same shape."""

def silu_mul(
    gate: npt.NDArray[np.float32],
    up: npt.NDArray[np.float32],
    y: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """silu(gate) · up, into y of the same shape."""

def rotate(
    x: npt.NDArray[np.float32],
    cos: npt.NDArray[np.float32],
    sin: npt.NDArray[np.float32],
    y: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """Turn the first numbers of each head of x [T, H, D] by cos and sin [T, dim/2], into y."""

def layer_norm(
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] | None,
    eps: float,
    y: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """(x − mean) / sqrt(variance + eps) · weight + bias over the last axis, into y of the same shape."""

def likeliest(x: npt.NDArray[np.float32], places: npt.NDArray[np.int64], *, isa: str | None = None) -> None:
    """The first place of the largest number of each row of x [R, N], into places [R]; −1 if one is not finite."""

def unary(
    op: str, x: npt.NDArray[np.generic], element: str, y: npt.NDArray[np.float32], *, isa: str | None = None
) -> None:
    """`copy`, `cos`, `sin`, `relu`, `gelu` (erf) or `silu` of each number of x (`element`: fp32, bf16, fp16, int64; any
    strides, axes of 1 repeated), into y, contiguous; at most 4 axes."""

def binary(
    op: str,
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    y: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """`add` or `multiply`, a and b with any strides, axes of 1 repeated, into y, contiguous; at most 4 axes."""

def scalar(
    op: str, x: npt.NDArray[np.float32], number: float, y: npt.NDArray[np.float32], *, isa: str | None = None
) -> None:
    """The same with one number."""

def copy(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> None:
    """Numbers of 1, 2, 4 or 8 bytes as they are; both with any strides, at most 4 axes."""

def add_int64(x: npt.NDArray[np.int64], term: int, y: npt.NDArray[np.int64]) -> None:
    """x + term, both contiguous."""

def gather(table: npt.NDArray[np.generic], ids: npt.NDArray[np.int64], y: npt.NDArray[np.generic]) -> None:
    """Rows `ids` [n] of a table [N, K] into y [n, K], numbers of any size.

    Raises:
        ValueError: an id is not in the table.
    """

class Program:
    """Recorded ops: see `ambidex.kernels.cpu.recorded`.

    Raises:
        ValueError: from `begin`, if the thread records already or the program has been recorded; from `end`, if the
            thread does not record it; from `run`, what an op raises.
    """

    def __init__(self) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def run(self) -> None: ...
    @property
    def num_ops(self) -> int: ...

class KeyBatch:
    """Which keys each request of a step sees: see `ambidex.kernels.cpu.native.KeyBatch`.

    Raises:
        TypeError: an array is not int64, not contiguous or has not one axis.
        ValueError: the numbers do not fit each other.
    """

    def __init__(
        self,
        block_ids: npt.NDArray[np.int64],
        block_offsets: npt.NDArray[np.int64],
        first_key: npt.NDArray[np.int64],
        num_keys: npt.NDArray[np.int64],
        row_offsets: npt.NDArray[np.int64],
        *,
        block_size: int,
    ) -> None: ...
    def set_positions(self, of_blocks: npt.NDArray[np.int64], of_rows: npt.NDArray[np.int64]) -> None:
        """Where the first token of each block, and each query, stand."""
        ...

    def assign(
        self,
        block_ids: npt.NDArray[np.int64],
        block_offsets: npt.NDArray[np.int64],
        first_key: npt.NDArray[np.int64],
        num_keys: npt.NDArray[np.int64],
        row_offsets: npt.NDArray[np.int64],
    ) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def block_size(self) -> int: ...

class ThreadPool:
    """Pinned threads: see `ambidex.kernels.cpu.native.ThreadPool`.

    Raises:
        ValueError: no threads are asked for.
    """

    def __init__(self, *, num_threads: int, spin_us: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_pin_failures(self) -> int: ...
    def read(self, bytes: npt.NDArray[np.uint8], *, isa: str | None = None) -> int: ...

class Matrices:
    """Weights [num_out, num_in] of one width, with their biases, whose memory is used where it lies.

    `number` (fp32, bf16, fp16) says what the numbers of the weights are.

    Raises:
        TypeError: an array is not contiguous or has another number of axes.
        ValueError: sizes do not fit each other.
    """

    def __init__(
        self,
        weights: Sequence[npt.NDArray[np.generic]],
        number: str,
        biases: Sequence[npt.NDArray[np.generic] | None],
    ) -> None: ...
    @staticmethod
    def quantized(
        weights: Sequence[npt.NDArray[np.uint8]],
        type: str,
        num_out: Sequence[int],
        biases: Sequence[npt.NDArray[np.generic] | None],
    ) -> Matrices:
        """The same for packed weights (csrc/ops/quant.h), [groups, bytes of a group] each, of `num_out` rows."""

def pack_rows(packed: npt.NDArray[np.uint8], type: str, rows: npt.NDArray[np.uint8], first_row: int) -> None:
    """Lay rows of a GGUF file out as rows `first_row` … of a packed matrix.

    Args:
        packed: [groups, bytes of a group], zeros where the rows go; rows: [n, bytes of a row].
        type: of GGUF: Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K.
    Raises:
        TypeError: an array is not contiguous or has another number of axes.
        ValueError: sizes do not fit each other.
    """

def unpack_rows(
    packed: npt.NDArray[np.uint8],
    type: str,
    num_rows: int,
    indices: npt.NDArray[np.int64],
    to: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """Rows of a packed matrix of `num_rows` rows in fp32: `to` [n, K] gets rows `indices` [n].

    Raises:
        TypeError, ValueError: as those of `pack_rows`, and where an index is no row.
    """

class LinearPool:
    """Matrix products and their scratch memory: see `ambidex.kernels.cpu.linear`.

    Raises:
        TypeError: an array is not contiguous, read-only where written, not fp32, or has another number of axes.
        ValueError: sizes do not fit each other.
    """

    def __init__(self, threads: ThreadPool, *, tiles_quantized: bool = False) -> None: ...
    def multiply(
        self,
        matrices: Matrices,
        x: npt.NDArray[np.float32],
        ys: Sequence[npt.NDArray[np.float32]],
        residual: npt.NDArray[np.float32] | None,
        *,
        isa: str | None = None,
    ) -> None: ...

class PickedPool:
    """Neurons of which few are needed, and the sums of threads: see `ambidex.kernels.cpu.picked`.

    Raises:
        TypeError: an array is not contiguous, read-only where written, of other numbers, or has another number of axes.
        ValueError: sizes do not fit each other, or a row is not in the table.
    """

    def __init__(self, threads: ThreadPool) -> None: ...
    def relu_sum(
        self,
        table: npt.NDArray[np.generic],
        number: str,
        in_rows: npt.NDArray[np.int64],
        out_rows: npt.NDArray[np.int64],
        biases: npt.NDArray[np.float32] | None,
        x: npt.NDArray[np.float32],
        h: npt.NDArray[np.float32],
        y: npt.NDArray[np.float32],
        *,
        isa: str | None = None,
    ) -> None: ...

class ScorePool:
    """Scores of keys in rows, and the queries as they are laid out: see `ambidex.kernels.cpu.score_rows`.

    Raises:
        TypeError: an array is not contiguous, read-only where written, or has another number of axes.
        ValueError: sizes or numbers do not fit each other.
    """

    def __init__(self, threads: ThreadPool) -> None: ...
    def score_rows(
        self,
        q: npt.NDArray[np.generic],
        q_number: str,
        keys: Sequence[npt.NDArray[np.generic]],
        num_keys: Sequence[int],
        number: str,
        scale: float,
        scores: npt.NDArray[np.generic],
        scores_number: str,
        *,
        isa: str | None = None,
    ) -> None: ...

class ScoreThread:
    """A thread that has a `ScorePool` score: see `ambidex.kernels.cpu.score_rows`. Ends with its last question's answer
    when it is dropped."""

    def __init__(self, pool: ScorePool, limit_s: float, spin_s: float) -> None: ...
    def ask(
        self,
        q: npt.NDArray[np.generic],
        q_number: str,
        keys: Sequence[npt.NDArray[np.generic]],
        num_keys: Sequence[int],
        number: str,
        scale: float,
        scores: npt.NDArray[np.generic],
        scores_number: str,
        word: npt.NDArray[np.int32] | None,
    ) -> int: ...
    def wait(self, number: int) -> tuple[bool, float, float]: ...

class AttentionPool:
    """Attention over tiled pools and its scratch memory: see `ambidex.kernels.cpu.native.AttentionPool`.

    Pools, q and rows are arrays of any numbers of the right size; names of numbers (fp32, bf16, fp16, int8, int4)
    say what they are.

    Raises:
        TypeError: an array is not contiguous, read-only where written, or has another number of axes.
        ValueError: sizes do not fit each other.
    """

    def __init__(self, threads: ThreadPool) -> None: ...
    def attend_blocks(
        self,
        q: npt.NDArray[np.generic],
        q_number: str,
        k: npt.NDArray[np.generic],
        v: npt.NDArray[np.generic],
        k_number: str,
        v_number: str,
        k_scales: npt.NDArray[np.generic] | None,
        v_scales: npt.NDArray[np.generic] | None,
        batch: KeyBatch,
        scale: float,
        out: npt.NDArray[np.float32],
        lse: npt.NDArray[np.float32],
        *,
        slopes: npt.NDArray[np.float32] | None = None,
        isa: str | None = None,
    ) -> None: ...
    def store_rows(
        self, part: str, pool: npt.NDArray[np.generic], slots: npt.NDArray[np.int64], rows: npt.NDArray[np.generic]
    ) -> None: ...
    def store_values(
        self,
        part: str,
        pool: npt.NDArray[np.generic],
        number: str,
        scales: npt.NDArray[np.float32] | None,
        slots: npt.NDArray[np.int64],
        rows: npt.NDArray[np.float32],
        *,
        isa: str | None = None,
    ) -> None: ...
    def pack_blocks(
        self, part: str, pool: npt.NDArray[np.generic], block_ids: npt.NDArray[np.int64], rows: npt.NDArray[np.generic]
    ) -> None: ...
    def copy_rows(
        self,
        part: str,
        pool: npt.NDArray[np.generic],
        block_ids: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        rows: npt.NDArray[np.generic],
    ) -> None: ...

class BoundedArrays:
    """The memory of one layer that bounded attention reads and writes; see `ambidex.kernels.cpu.bounded`."""

    def __init__(
        self,
        q: npt.NDArray[np.generic],
        q_number: str,
        scanned: npt.NDArray[np.generic],
        scales: npt.NDArray[np.float32],
        rows: npt.NDArray[np.generic] | None,
        v: npt.NDArray[np.generic],
        number: str,
        v_scales: npt.NDArray[np.float32] | None,
        norms: npt.NDArray[np.float32],
        scale: float,
        max_mass: float,
        near_out: npt.NDArray[np.float32] | None,
        near_lse: npt.NDArray[np.float32] | None,
        other_lse: npt.NDArray[np.float32] | None,
        out: npt.NDArray[np.float32],
        lse: npt.NDArray[np.float32],
        figures: npt.NDArray[np.float32],
        kept_of_block: npt.NDArray[np.int32] | None,
    ) -> None: ...

class BoundedTuning:
    """What benchmarks vary: see csrc/ops/bounded.h."""

    scan_far_bytes: int
    is_near_fetched_late: bool
    code_pieces_ahead: int
    keep_far_keys: int
    keep_near_keys: int
    is_keep_fetch_spread: bool

class BoundedPool:
    """See `ambidex.kernels.cpu.bounded.BoundedPool`."""

    @property
    def tuning(self) -> BoundedTuning: ...
    def __init__(self, threads: ThreadPool) -> None: ...
    def attend(self, arrays: BoundedArrays, batch: KeyBatch, *, isa: str | None = None) -> None: ...
    def take_phase_seconds(self) -> list[float]: ...
    def copy_for_scan(
        self,
        k: npt.NDArray[np.generic],
        v: npt.NDArray[np.generic],
        number: str,
        k_scales: npt.NDArray[np.float32] | None,
        v_scales: npt.NDArray[np.float32] | None,
        head_dim: int,
        block_ids: npt.NDArray[np.int64],
        scanned: npt.NDArray[np.int8] | None,
        scales: npt.NDArray[np.float32] | None,
        rows: npt.NDArray[np.generic] | None,
        norms: npt.NDArray[np.float32],
        *,
        isa: str | None = None,
    ) -> None: ...

class AttentionScript:
    """The CPU lane of a captured step: see `ambidex.kernels.cpu.native.AttentionScript`; words are [L, 16]."""

    def __init__(
        self,
        pool: AttentionPool,
        asked: npt.NDArray[np.int32],
        answered: npt.NDArray[np.int32],
        streamed: npt.NDArray[np.int32],
        *,
        isa: str | None = None,
    ) -> None: ...
    def add_layer(
        self,
        q: npt.NDArray[np.generic],
        q_number: str,
        k: npt.NDArray[np.generic],
        v: npt.NDArray[np.generic],
        k_number: str,
        v_number: str,
        k_scales: npt.NDArray[np.generic] | None,
        v_scales: npt.NDArray[np.generic] | None,
        scale: float,
        out: npt.NDArray[np.float32],
        lse: npt.NDArray[np.float32],
    ) -> None: ...
    def bound_layer(self, pool: BoundedPool, arrays: BoundedArrays) -> None: ...
    def run(self, batches: Sequence[KeyBatch], limit_s: float, scanned: Sequence[KeyBatch]) -> tuple[int, int]: ...
    @property
    def busy_s(self) -> float: ...
