// Packed K and V (ops/kv_int4.h) as int8 in tile order, compiled once per instruction set (per_isa.cpp).
#pragma once

#include "ops/kv_int4.h"
#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

// What turns a line's bytes into int8, for the low and the high half of each.
struct Steps {
  alignas(64) uint8_t low_step[64], low_zero[64], high_step[64], high_zero[64];
};

// A packed line becomes two: zero + step * number, in 8 bits, which hold it.
inline void unpack_line(const char* line, const Steps& steps, char* low, char* high) {
  const auto* __restrict__ bytes = reinterpret_cast<const uint8_t*>(line);
  auto* __restrict__ a = reinterpret_cast<uint8_t*>(low);
  auto* __restrict__ b = reinterpret_cast<uint8_t*>(high);
  for (int i = 0; i < 64; ++i) {
    a[i] = static_cast<uint8_t>(steps.low_zero[i] + steps.low_step[i] * (bytes[i] & 15));
    b[i] = static_cast<uint8_t>(steps.high_zero[i] + steps.high_step[i] * (bytes[i] >> 4));
  }
}

inline void fetch_line(const char* far, const char* near) {
  prefetch_to_l2(far);
  prefetch(near);
}

// 16 tokens of K. Their words lie block_size apart, the scales first; far and near are fetched line by line.
inline void unpack_k_unit(const char* unit, const char* far, const char* near, const float* words, std::size_t block_size,
                          std::size_t dim, char* to) {
  Steps steps;
  for (std::size_t pair = 0; pair < dim / 32; ++pair) {
    uint32_t tokens[16];
    memcpy(tokens, words + (1 + pair) * block_size, sizeof tokens);
    const auto spread = [&](int shift, uint8_t* bytes) {  // a byte of each token's word to all four of its lane
      uint32_t lanes[16];
      for (int i = 0; i < 16; ++i) lanes[i] = (tokens[i] >> shift & 255u) * 0x01010101u;
      memcpy(bytes, lanes, sizeof lanes);
    };
    spread(0, steps.low_step);
    spread(8, steps.low_zero);
    spread(16, steps.high_step);
    spread(24, steps.high_zero);
    for (std::size_t line = 4 * pair; line < 4 * pair + 4; ++line) {
      fetch_line(far + 64 * line, near + 64 * line);
      unpack_line(unit + 64 * line, steps, to + 64 * (4 * pair + line), to + 64 * (4 * pair + line + 4));
    }
  }
}

// Two columns of V: `depth` tokens by 32 dims. `words` are the tokens' for those dims.
inline void unpack_v_columns(const char* column, const char* far, const char* near, const float* words, std::size_t depth,
                             char* to) {
  Steps steps;
  for (std::size_t line = 0; line < depth / 4; ++line) {
    uint32_t tokens[4];
    memcpy(tokens, words + 4 * line, sizeof tokens);
    const auto spread = [&](int shift, uint8_t* bytes) {  // a byte of each of four tokens' words to every lane
      uint32_t lane = 0, lanes[16];
      for (int i = 0; i < 4; ++i) lane |= (tokens[i] >> shift & 255u) << 8 * i;
      for (uint32_t& one : lanes) one = lane;
      memcpy(bytes, lanes, sizeof lanes);
    };
    spread(0, steps.low_step);
    spread(8, steps.low_zero);
    spread(16, steps.high_step);
    spread(24, steps.high_zero);
    fetch_line(far + 64 * line, near + 64 * line);
    unpack_line(column + 64 * line, steps, to + 64 * line, to + 16 * depth + 64 * line);
  }
}

}  // namespace ambidex::AMBIDEX_ISA
