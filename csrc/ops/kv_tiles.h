// Tile order: where element (token, dim) of K or V lies within a block (docs/kv_layout.md).
//
// A pool part (K or V of one layer) is [Hkv, N, record], a record holding the P * padded_dim elements of a block. It
// is a row of 64-byte lines; a line holds 16 lanes of `pack` = 4 / element size elements:
//
//   K, for each 16 tokens:       [padded_dim / pack lines][16 tokens][pack dims]
//   V, for each `depth` tokens:  [padded_dim / 16 columns][depth / pack lines][16 dims][pack tokens]
//
// so that 16 lines of bf16 or int8 are one AMX tile of q·K or of P·V, and a line is one vector of every other form.
// Records of 4-bit numbers are those of int8 with a byte for two numbers (ops/kv_int4.h): half as many lines.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/number.h"
#include "core/pool.h"
#include "simd/isa.h"

namespace ambidex {

enum class KVPart { kK, kV };

// NOTE: no member functions: code compiled for several instruction sets includes this.
struct KVTiles {
  std::size_t element_size;  // bytes: 4, 2 or 1
  std::size_t block_size;    // P, a multiple of 16
  std::size_t padded_dim;    // elements of a row, a multiple of 16
  std::size_t pack;          // elements of a lane
  std::size_t depth;         // tokens of V that are mixed: what an AMX tile multiplies at once, if it divides a block
  std::size_t record_bytes;
};

// Throws std::invalid_argument for sizes that tiles cannot have.
KVTiles make_tiles(std::size_t element_size, std::size_t block_size, std::size_t padded_dim);

// All copies below take elements as plain bytes: `row` etc. point to element_size-sized numbers. Dims from head_dim to
// padded_dim are written as 0. They run on the threads of `pool`; allocate nothing.
struct TiledPart {
  KVPart part;
  KVTiles tiles;
  std::size_t num_heads;
  std::size_t num_blocks;
  std::size_t head_dim;
};

// rows [T, Hkv, D] go to slots [T] (block_id * P + offset), no two alike.
void store_rows(ThreadPool& pool, const TiledPart& to, char* records, const std::int64_t* slots, std::size_t num_rows,
                const char* rows);

// The same from fp32 rows [T, Hkv, D], which are rounded to the pool's numbers (int8: each row gets its scale in scales
// [Hkv, N, P]; int4: its words in scales [Hkv, N, W, P], and head_dim of `to` is that of the packed rows; null otherwise). Tokens with a negative slot are stored nowhere. Throws std::invalid_argument for a slot outside. In
// the calling thread: for the few rows of a decode step.
void store_values(Isa isa, Number number, const TiledPart& to, char* records, float* scales, const std::int64_t* slots,
                  std::size_t num_rows, std::size_t head_dim, const float* rows);

// rows [Hkv, n * P, D] fill the blocks block_ids [n].
void pack_blocks(ThreadPool& pool, const TiledPart& to, char* records, const std::int64_t* block_ids,
                 std::size_t num_blocks, const char* rows);

// Where rows go: [Hkv, num_rows, D], the heads `head_bytes` apart.
struct RowTarget {
  char* rows;
  std::size_t num_rows, head_bytes;
};

// The rows of block block_ids[i] go to rows places[i], places[i] + 1, …; those that come to lie outside of the target are
// left out.
void copy_rows(ThreadPool& pool, const TiledPart& from, const char* records, const std::int64_t* block_ids,
                 const std::int64_t* places, std::size_t num_blocks, const RowTarget& to);

}  // namespace ambidex
