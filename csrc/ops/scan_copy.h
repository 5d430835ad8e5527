// What bounded attention reads beside K and V (ops/bounded.h): an 8-bit copy of K in tile order, K and V row after row, and
// how long rows are. Made of blocks whose rows are all there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/number.h"
#include "core/pool.h"
#include "ops/kv_tiles.h"
#include "simd/isa.h"

namespace ambidex {

// One layer of a pool, and of what is made of it.
struct ScanCopyCall {
  Number number;
  KVTiles tiles;
  std::size_t num_heads, num_blocks, head_dim;
  const char *k, *v;                  // [Hkv, N, record]
  const float *k_scales, *v_scales;   // int8 only
  std::int8_t* scanned;               // [Hkv, N, record] of int8; null: K is int8 itself
  float* scales;                      // [Hkv, N, P], with scanned
  char* rows;                         // [Hkv, N, P, 2, padded_dim], with scanned, in the pool's number
  float* norms;                       // [Hkv, N, 2]
};

// Spread over the threads of the pool; its caller holds the pool's mutex.
void copy_for_scan(ThreadPool& threads, Isa isa, const ScanCopyCall& call, const std::int64_t* block_ids,
                   std::size_t num_block_ids);

}  // namespace ambidex
