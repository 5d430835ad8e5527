// What both passes of bounded attention make of a range's queries, compiled once per instruction set (per_isa.cpp).
#pragma once

#include <math.h>
#include <string.h>

#include "ops/attention-inl.h"
#include "ops/bounded.h"

namespace ambidex::AMBIDEX_ISA {

// The longest row of K and of V in the blocks of a range; NaN if there is one.
struct Norms {
  float k, v;
};

inline Norms longest(const BoundedCall& call, const AttendRange& range) {
  const float* norms = call.norms + range.kv_head * call.scan.num_blocks * 2;
  const std::size_t block_size = call.scan.tiles.block_size;
  Norms found{0.0f, 0.0f};
  for (std::size_t i = range.first_key / block_size; i <= (range.first_key + range.num_keys - 1) / block_size; ++i) {
    const float* of_block = norms + 2 * range.block_ids[i];
    found.k = of_block[0] > found.k || of_block[0] != of_block[0] ? of_block[0] : found.k;
    found.v = of_block[1] > found.v || of_block[1] != of_block[1] ? of_block[1] : found.v;
  }
  return found;
}

template <class Half>
inline void widen_row(const Half* from, std::size_t num, float* to) {
  for (std::size_t i = 0; i < num; ++i) to[i] = to_float(from[i]);
}

// Queries of a range as fp32 rows [rows, padded_dim].
inline void widen_queries(const AttendCall& call, const AttendRange& range, std::size_t rows, float* to) {
  const std::size_t dim = call.tiles.padded_dim, num_q_heads = call.num_kv_heads * call.group_size;
  for (std::size_t row = 0; row < rows; ++row, to += dim) {
    const std::size_t token = range.first_row + row / call.group_size;
    const std::size_t head = range.kv_head * call.group_size + row % call.group_size;
    const std::size_t from = (token * num_q_heads + head) * call.head_dim;
    if (call.q_number == Number::kFp32) {
      memcpy(to, static_cast<const float*>(call.q) + from, call.head_dim * sizeof(float));
    } else if (call.q_number == Number::kBf16) {
      widen_row(static_cast<const Bf16*>(call.q) + from, call.head_dim, to);
    } else {
      widen_row(static_cast<const Fp16*>(call.q) + from, call.head_dim, to);
    }
    memset(to + call.head_dim, 0, (dim - call.head_dim) * sizeof(float));
  }
}

}  // namespace ambidex::AMBIDEX_ISA
