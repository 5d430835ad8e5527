"""`SplitMatrix`: rows of a file go to the pieces that they belong to, plain or quantised."""

import pytest
import torch

from ambidex.kernels.cpu.quantized import BLOCKS, QuantizedMatrix
from ambidex.layers.split_matrix import Piece, SplitMatrix
from quantized_rows import dequantize, random_rows

NUM_ROWS = 70


def fill(matrix: SplitMatrix, values: torch.Tensor) -> None:
    for start, stop in ((0, 7), (7, 33), (33, NUM_ROWS)):
        for target, some in matrix.cut(start, values[start:stop]):
            target.copy_(some)


@pytest.mark.parametrize("axis", [0, 1])
def test_plain_numbers_go_to_their_pieces(axis: int) -> None:
    values = torch.randn(NUM_ROWS, 48)
    cuts = [(0, 16), (16, 40), (40, values.shape[axis])]
    pieces = [
        Piece(start, torch.empty((stop - start, 48) if axis == 0 else (NUM_ROWS, stop - start))) for start, stop in cuts
    ]
    matrix = SplitMatrix((NUM_ROWS, 48), pieces[::-1], axis=axis)
    fill(matrix, values)
    assert torch.equal(matrix.dense(), values)
    assert matrix.kind is None


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantised_rows_go_to_pieces_that_share_their_memory_with_others(kind: str) -> None:
    width = 2 * BLOCKS[kind][0]
    rows = random_rows(kind, NUM_ROWS, 2, seed=5)
    wanted = torch.from_numpy(dequantize(kind, rows))
    first, second = (QuantizedMatrix.zeros(kind, (num, width)) for num in (48, 64))
    pieces = [Piece(0, first, first=5, num=40), Piece(40, second, first=16, num=30)]
    matrix = SplitMatrix((NUM_ROWS, width), pieces, axis=0)
    for start, stop in ((0, 7), (7, 33), (33, NUM_ROWS)):
        matrix.pack(start, rows[start:stop])
    assert torch.equal(matrix.dense(), wanted)
    assert torch.equal(first.dense()[5:45], wanted[:40])
    assert not first.dense()[:5].any()
    assert matrix.kind == kind


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantised_columns_go_to_their_pieces(kind: str) -> None:
    block = BLOCKS[kind][0]
    rows = random_rows(kind, NUM_ROWS, 3, seed=6)
    pieces = [
        Piece(0, QuantizedMatrix.zeros(kind, (NUM_ROWS, 2 * block))),
        Piece(2 * block, QuantizedMatrix.zeros(kind, (NUM_ROWS, block))),
    ]
    matrix = SplitMatrix((NUM_ROWS, 3 * block), pieces, axis=1)
    for start, stop in ((0, 7), (7, NUM_ROWS)):
        matrix.pack(start, rows[start:stop])
    assert torch.equal(matrix.dense(), torch.from_numpy(dequantize(kind, rows)))
