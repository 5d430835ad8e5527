// Quantised matrices as they are kept for products: the bytes of GGUF's blocks, laid out anew for 16 lanes.
//
// 16 rows are a group. A group is a run of records, one for each block of its rows' numbers (core/number.h), each 16
// times as large as the block: the rows' 16 scales side by side, then lines of 64 bytes, of which row r of the group has
// bytes 4 r … 4 r + 3. Integers of 32 numbers:
//
//   4 bits   4 lines: number 8 l + 2 p in bits 4 p of the word in line l, number 8 l + 2 p + 1 in bits 16 + 4 p; p < 4
//   8 bits   8 lines: numbers 4 l … 4 l + 3 in bytes 0, 2, 1, 3 of the word in line l
//
// so that masks and shifts alone give pairs of 16-bit integers, neighbours in the row, and no sum crosses lanes. Numbers
// that share a scale are a run, whose lines lie together. Records:
//
//   Q8_0   16 fp16 scales d; the run                                                     w = d q
//   Q4_0   16 fp16 scales d; the run                                                     w = d (q - 8)
//   Q4_1   16 fp16 scales d; 16 fp16 minima m; the run                                   w = d q + m
//   Q4_K   16 fp16 scales d; 16 fp16 e; 3 lines of 6-bit s and m; 8 runs                 w = d s q - e m
//   Q5_K   the same; a run begins with a line of its numbers' fifth bits                 w = d s q - e m
//   Q6_K   16 fp16 scales d; 4 lines of int8 s; 16 runs of 16 numbers: a line of their
//          upper two bits, 2 lines of the lower four                                     w = d s (q - 32)
//
// s and m of run j: their lower four bits in bits 4 j of the first and the second line's words, their upper two bits in
// bits 2 j and 16 + 2 j of the third's. s of Q6_K: byte j. The fifth bit of number 8 l + 2 p lies in bit 4 l + p, that of
// the number after it in bit 16 + 4 l + p; upper two bits in bits 8 l + 2 p and 16 + 8 l + 2 p.
//
// Rows that fill up the last group are zeros. Source of the blocks: ggml, ggml-common.h and ggml-quants.c.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/number.h"
#include "simd/isa.h"

namespace ambidex {

constexpr std::size_t kGroupRows = 16;

// Bytes of a packed matrix.
constexpr std::size_t packed_bytes(Number number, std::size_t num_rows, std::size_t num_in) {
  return (num_rows + kGroupRows - 1) / kGroupRows * kGroupRows * row_bytes(number, num_in);
}

// Rows as a GGUF file holds them, to be rows first_row … of a packed matrix, which is zeros there.
struct PackCall {
  Number number;
  const std::uint8_t* rows;  // [num_rows, row_bytes(number, num_in)]
  std::size_t num_rows, num_in, first_row;
  std::uint8_t* packed;
};
void pack_rows(const PackCall& call);

// Rows of a packed matrix in fp32, as ggml dequantises them: to[i] = row indices[i].
struct UnpackCall {
  Number number;
  const std::uint8_t* packed;
  const std::int64_t* indices;
  std::size_t num_rows, num_in;
  float* to;  // [num_rows, num_in]
};
void unpack_rows(Isa isa, const UnpackCall& call);

}  // namespace ambidex
