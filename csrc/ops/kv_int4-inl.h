// Packed K and V (ops/kv_int4.h) as int8 in tile order, compiled once per instruction set (per_isa.cpp).
#pragma once

#include "ops/kv_int4.h"
#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

// NOTE: vectors as wide as the instruction set's registers: GCC makes plain code of wider ones.
#if defined(__AVX512BW__)
constexpr std::size_t kUnpackBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kUnpackBytes = 32;
#else
constexpr std::size_t kUnpackBytes = 16;
#endif
constexpr std::size_t kUnpackParts = 64 / kUnpackBytes;
typedef uint16_t Halves __attribute__((vector_size(kUnpackBytes)));
typedef uint32_t TokenWords __attribute__((vector_size(kUnpackBytes)));

// What turns the 4-bit numbers of a part of a line into int8. There are products of 16 bits and none of 8, so steps and
// zeros of even and of odd bytes lie apart: a product's low byte is an even one's, and odd ones are multiplied 256-fold.
struct Steps {
  Halves even_step, odd_step, even_zero, odd_zero;
};

// Four bytes of steps or zeros in each word, in the order of a line's.
inline Steps make_steps(TokenWords steps, TokenWords zeros) {
  Halves step, zero;
  memcpy(&step, &steps, kUnpackBytes);
  memcpy(&zero, &zeros, kUnpackBytes);
  return {step & 0xff, step >> 8, zero & 0xff, zero & 0xff00};
}

// zero + step * number, in 8 bits, which hold it.
inline void put_whole(Halves numbers, const Steps& steps, char* to) {
  const Halves even = (steps.even_step * (numbers & 0xff) + steps.even_zero) & 0xff;
  const Halves odd = steps.odd_step * (numbers & 0xff00) + steps.odd_zero;
  const Halves whole = even | odd;
  memcpy(to, &whole, kUnpackBytes);
}

// A part of a packed line becomes one of each of two lines.
inline void unpack_part(const char* part, const Steps& low, const Steps& high, char* to_low, char* to_high) {
  Halves bytes;
  memcpy(&bytes, part, kUnpackBytes);
  put_whole(bytes & 0x0f0f, low, to_low);
  put_whole((bytes >> 4) & 0x0f0f, high, to_high);
}

inline void fetch_line(const char* far, const char* near) {
  prefetch_to_l2(far);
  prefetch(near);
}

// A byte of each token's word to all four of its lane.
inline TokenWords spread_byte(TokenWords tokens, int shift) {
  const TokenWords one = tokens >> shift & 255u;
  const TokenWords two = one | one << 8;
  return two | two << 16;
}

// 16 tokens of K. Their words lie block_size apart, the scales first; far and near are fetched line by line.
inline void unpack_k_unit(const char* unit, const char* far, const char* near, const float* words, std::size_t block_size,
                          std::size_t dim, char* to) {
  for (std::size_t pair = 0; pair < dim / 32; ++pair) {
    for (std::size_t part = 0; part < kUnpackParts; ++part) {
      const std::size_t offset = kUnpackBytes * part;
      TokenWords tokens;
      memcpy(&tokens, reinterpret_cast<const char*>(words + (1 + pair) * block_size) + offset, kUnpackBytes);
      const Steps low = make_steps(spread_byte(tokens, 0), spread_byte(tokens, 8));
      const Steps high = make_steps(spread_byte(tokens, 16), spread_byte(tokens, 24));
      for (std::size_t line = 4 * pair; line < 4 * pair + 4; ++line) {
        if (part == 0) fetch_line(far + 64 * line, near + 64 * line);
        char* there = to + 64 * (4 * pair + line) + offset;
        unpack_part(unit + 64 * line + offset, low, high, there, there + 4 * 64);
      }
    }
  }
}

// Two columns of V: `depth` tokens by 32 dims. `words` are the tokens' for those dims.
inline void unpack_v_columns(const char* column, const char* far, const char* near, const float* words, std::size_t depth,
                             char* to) {
  const TokenWords none = {};
  for (std::size_t line = 0; line < depth / 4; ++line) {
    uint32_t tokens[4];
    memcpy(tokens, words + 4 * line, sizeof tokens);
    // The bytes of four tokens' words, turned: one word of their first bytes, one of their second, …, to every lane.
    const uint32_t even = 0x00ff00ffu;
    const uint32_t steps_01 = (tokens[0] & even) | (tokens[1] & even) << 8;
    const uint32_t steps_23 = (tokens[2] & even) | (tokens[3] & even) << 8;
    const uint32_t zeros_01 = (tokens[0] >> 8 & even) | (tokens[1] & ~even);
    const uint32_t zeros_23 = (tokens[2] >> 8 & even) | (tokens[3] & ~even);
    const Steps low = make_steps(none + ((steps_01 & 0xffffu) | steps_23 << 16), none + ((zeros_01 & 0xffffu) | zeros_23 << 16));
    const Steps high = make_steps(none + (steps_01 >> 16 | (steps_23 & 0xffff0000u)),
                                  none + (zeros_01 >> 16 | (zeros_23 & 0xffff0000u)));
    fetch_line(far + 64 * line, near + 64 * line);
    for (std::size_t part = 0; part < kUnpackParts; ++part) {
      const std::size_t offset = kUnpackBytes * part;
      char* there = to + 64 * line + offset;
      unpack_part(column + 64 * line + offset, low, high, there, there + 16 * depth);
    }
  }
}

}  // namespace ambidex::AMBIDEX_ISA
