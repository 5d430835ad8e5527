// Body of the products with quantised matrices, compiled once per instruction set (per_isa.cpp). The layout: quant.h.
//
//   y[t, n] = sum over blocks b of  d_w[n, b] * d_x[t, b] * Σ q_w q_x  +  m_w[n, b] * Σ x[t, b]    (+ bias) (+ residual)
//
// x is turned into 16-bit integers q_x once a call, with one scale d_x for each 32 numbers: the error of a number is at
// most 2^-16 of the largest of its 32. Σ q_w q_x is exact in 32 bits (127 * 32767 * 32 < 2^31), all else is fp32. Lanes
// are rows: no sum crosses them, and a token's result depends on neither the threads nor the tokens beside it.
#pragma once

#include "ops/linear.h"
#include "ops/quant_types-inl.h"

namespace ambidex::AMBIDEX_ISA {

constexpr std::size_t kBlock = 32;              // numbers of x that share a scale
constexpr float kLargestInteger = 32767.0f;

// A token of packed x: integers [num_in] int16, then for each block its scale and the sum of x, for each half of a block
// the sum of its integers.
struct QuantToken {
  const int16_t* integers;
  const float* scales;
  const float* sums;
  const int32_t* integer_sums;
};

std::size_t quant_token_width(std::size_t num_in) { return num_in / 2 + (4 * num_in / kBlock + 15) / 16 * 16; }

inline QuantToken token_of(const float* packed, std::size_t num_in) {
  const float* scales = packed + num_in / 2;
  const std::size_t num_blocks = num_in / kBlock;
  return {reinterpret_cast<const int16_t*>(packed), scales, scales + num_blocks,
          reinterpret_cast<const int32_t*>(scales + 2 * num_blocks)};
}

void pack_quant_tokens(const float* x, std::size_t num_tokens, std::size_t num_in, float* packed) {
  const std::size_t num_blocks = num_in / kBlock;
  for (std::size_t t = 0; t < num_tokens; ++t, packed += quant_token_width(num_in)) {
    auto* integers = reinterpret_cast<int16_t*>(packed);
    float* scales = packed + num_in / 2;
    auto* integer_sums = reinterpret_cast<int32_t*>(scales + 2 * num_blocks);
    for (std::size_t b = 0; b < num_blocks; ++b, x += kBlock, integers += kBlock) {
      const Lanes first = Lanes::load(x), second = Lanes::load(x + 16);
      const float largest = largest_of(larger(absolute(first), absolute(second)));
      const float sum = sum_of(first + second);
      // Tiny numbers need no larger factor than 2^126: their error stays below 2^-127. A sum that is not finite makes
      // the block's part of every result NaN.
      const float wanted = kLargestInteger / largest;
      const float factor = wanted < 0x1p126f ? wanted : 0x1p126f;
      const bool is_finite = sum - sum == 0.0f;
      const Lanes factors = Lanes::broadcast(is_finite ? factor : 0.0f);
      store_int16(is_finite ? first * factors : Lanes::zero(), integers);
      store_int16(is_finite ? second * factors : Lanes::zero(), integers + 16);
      int32_t halves[2] = {};
      for (std::size_t i = 0; i < kBlock; ++i) halves[i / 16] += integers[i];
      scales[b] = is_finite ? 1.0f / factor : sum - sum;
      scales[num_blocks + b] = sum;
      memcpy(integer_sums + 2 * b, halves, sizeof halves);
    }
  }
}

// The records of a group follow each other in one run, which the processor's own prefetching takes for what it is; asking
// ahead pays at the end of a page.
constexpr std::size_t kQuantAhead = 4096;

// kRuns runs of a record times kTokens tokens, added to their totals. `number` is the place of the first in the rows.
template <class Q, std::size_t kTokens>
inline void add_record(const char* record, std::size_t number, const QuantToken& token, std::size_t width,
                       Lanes (&totals)[kTokens]) {
  for (std::size_t run = 0; run < Q::kRuns; ++run, number += Q::kNumbers) {
    const int16_t* x = token.integers + number;
    IntLanes sums[kTokens];
#pragma GCC unroll 8
    for (std::size_t t = 0; t < kTokens; ++t) {
      sums[t] = IntLanes::zero();
      if (Q::kOffset != 0) {
        const int32_t* halves = token.integer_sums + t * width + number / 16;
        sums[t] = broadcast_int(-Q::kOffset * (Q::kNumbers == 16 ? halves[0] : halves[0] + halves[1]));
      }
    }
    const char* lines = record + Q::kRunsAt + run * Q::kRunBytes;
#pragma GCC unroll 8
    for (std::size_t i = 0; i < Q::kRunBytes; i += 64) prefetch(lines + kQuantAhead + i);
#pragma GCC unroll 8
    for (std::size_t line = 0; line < Q::kLines; ++line) {
      IntLanes parts[Q::kParts];
      Q::load(lines, line, parts);
#pragma GCC unroll 4
      for (std::size_t p = 0; p < Q::kParts; ++p) {
#pragma GCC unroll 8
        for (std::size_t t = 0; t < kTokens; ++t) {
          const IntLanes pair = IntLanes::broadcast_pair(x + t * 2 * width + 2 * (line * Q::kParts + p));
          sums[t] = add_pair_products(sums[t], pair, parts[p]);
        }
      }
    }
    const Lanes scale = Q::scale(record, run);
#pragma GCC unroll 8
    for (std::size_t t = 0; t < kTokens; ++t) {
      const Lanes both = scale * Lanes::broadcast(token.scales[t * width + number / kBlock]);
      totals[t] = mul_add(to_lanes(sums[t]), both, totals[t]);
    }
    if (Q::kHasMins) {
      const Lanes min = Q::min(record, run);
#pragma GCC unroll 8
      for (std::size_t t = 0; t < kTokens; ++t) {
        totals[t] = mul_add(min, Lanes::broadcast(token.sums[t * width + number / kBlock]), totals[t]);
      }
    }
  }
}

// 16 rows times kTokens tokens.
template <class Q, std::size_t kTokens>
inline void multiply_group(const LinearRange& range, std::size_t first_row, std::size_t first_token) {
  constexpr Block kOfType = block_of(Q::kNumber);
  const std::size_t num_in = range.num_in, width = quant_token_width(num_in);
  const char* record = static_cast<const char*>(range.weight) + first_row * row_bytes(Q::kNumber, num_in);
  const QuantToken token = token_of(range.x + first_token * width, num_in);
  Lanes totals[kTokens];
#pragma GCC unroll 8
  for (std::size_t t = 0; t < kTokens; ++t) totals[t] = Lanes::zero();
  for (std::size_t number = 0; number < num_in; number += kOfType.numbers) {
    prefetch(record + kQuantAhead);
    add_record<Q, kTokens>(record, number, token, width, totals);
    record += kGroupRows * kOfType.bytes;
  }
  const std::size_t num_rows = range.num_rows - first_row < kGroupRows ? range.num_rows - first_row : kGroupRows;
  for (std::size_t t = 0; t < kTokens; ++t) {
    const std::size_t at = (first_token + t) * range.y_stride + first_row;
    float y[kGroupRows];
    totals[t].store(y);
    for (std::size_t r = 0; r < num_rows; ++r) {
      if (range.bias != nullptr) y[r] += range.bias[first_row + r];
      if (range.residual != nullptr) y[r] += range.residual[at + r];
      range.y[at + r] = y[r];
    }
  }
}

template <class Q, std::size_t kTokens>
void multiply_groups(const LinearRange& range, std::size_t first_token) {
  for (std::size_t row = 0; row < range.num_rows; row += kGroupRows) {
    multiply_group<Q, kTokens>(range, row, first_token);
  }
}

// Tokens at a time: their sums stay in registers, beside the weights' pairs and one of x; 8 with AVX-512, whose products
// and sums take 5 cycles each. Fewer at the end, each count a body of its own, but where plain loops make bodies large
// (and slow to compile).
template <class Q>
void multiply_quant_of(const LinearRange& range) {
  std::size_t token = 0;
#if defined(__AVX512F__)
  for (; token + 8 <= range.num_tokens; token += 8) multiply_groups<Q, 8>(range, token);
#endif
  for (; token + 4 <= range.num_tokens; token += 4) multiply_groups<Q, 4>(range, token);
#if defined(__AVX2__)
  switch (range.num_tokens - token) {
    case 3:
      return multiply_groups<Q, 3>(range, token);
    case 2:
      return multiply_groups<Q, 2>(range, token);
    case 1:
      return multiply_groups<Q, 1>(range, token);
    default:
      return;
  }
#else
  for (; token < range.num_tokens; ++token) multiply_groups<Q, 1>(range, token);
#endif
}

void multiply_quant_range(const LinearRange& range) {
  switch (range.number) {
    case Number::kQ8_0:
      return multiply_quant_of<Q8_0>(range);
    case Number::kQ4_0:
      return multiply_quant_of<Q4_0>(range);
    case Number::kQ4_1:
      return multiply_quant_of<Q4_1>(range);
    case Number::kQ4_K:
      return multiply_quant_of<Q4_K>(range);
    case Number::kQ5_K:
      return multiply_quant_of<Q5_K>(range);
    case Number::kQ6_K:
      return multiply_quant_of<Q6_K>(range);
    default:
      return;
  }
}

inline float fp16_at(const char* p, std::size_t lane) {
  Fp16 half;
  memcpy(&half, p + 2 * lane, sizeof half);
  return to_float(half);
}

inline uint32_t word_at(const char* line, std::size_t lane) {
  uint32_t word;
  memcpy(&word, line + 4 * lane, sizeof word);
  return word;
}

// What a run's integers are multiplied with and what is added to them, for one row.
struct RowScale {
  float scale, min;
  int32_t offset;
};

// Lines of 8 numbers of 4 bits each; `upper_bits` of them lie in the line `upper`.
inline void unpack_nibbles(const char* lines, std::size_t num_lines, const char* upper, uint32_t upper_bits,
                           std::size_t lane, const RowScale& by, float* to) {
  constexpr uint32_t kPairs[8] = {0, 0, 1, 1, 2, 2, 3, 3};
  const uint32_t above = upper_bits == 0 ? 0u : word_at(upper, lane), mask = (1u << upper_bits) - 1u;
  for (std::size_t line = 0; line < num_lines; ++line) {
    const uint32_t word = word_at(lines + 64 * line, lane);
    const auto first = static_cast<uint32_t>(line) * 4 * upper_bits;
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t half = i % 2 * 16, low = word >> (half + 4 * kPairs[i]) & 15u;
      const uint32_t high = above >> (half + first + kPairs[i] * upper_bits) & mask;
      to[8 * line + i] = by.scale * static_cast<float>(static_cast<int32_t>(low | high << 4) - by.offset) + by.min;
    }
  }
}

inline void unpack_bytes(const char* lines, std::size_t lane, float scale, float* to) {
  constexpr uint32_t kShifts[4] = {24, 8, 16, 0};
  for (std::size_t line = 0; line < 8; ++line) {
    const uint32_t word = word_at(lines + 64 * line, lane);
    for (std::size_t i = 0; i < 4; ++i) {
      to[4 * line + i] = scale * static_cast<float>(static_cast<int32_t>(word << kShifts[i]) >> 24);
    }
  }
}

// The 6-bit s and m of a run of Q4_K and Q5_K.
inline RowScale six_bit_scale(const char* record, std::size_t lane, uint32_t run) {
  const uint32_t upper = word_at(record + 192, lane);
  const uint32_t s = (word_at(record + 64, lane) >> 4 * run & 15u) | (upper >> 2 * run & 3u) << 4;
  const uint32_t m = (word_at(record + 128, lane) >> 4 * run & 15u) | (upper >> (16 + 2 * run) & 3u) << 4;
  return {fp16_at(record, lane) * static_cast<float>(s), -(fp16_at(record + 32, lane) * static_cast<float>(m)), 0};
}

// One row of a record, to its numbers in fp32. Products of fp16 scales by the integers are exact there.
inline void unpack_block(Number number, const char* record, std::size_t lane, float* to) {
  const float scale = fp16_at(record, lane);
  switch (number) {
    case Number::kQ8_0:
      return unpack_bytes(record + Q8_0::kRunsAt, lane, scale, to);
    case Number::kQ4_0:
      return unpack_nibbles(record + Q4_0::kRunsAt, 4, nullptr, 0, lane, {scale, 0.0f, 8}, to);
    case Number::kQ4_1:
      return unpack_nibbles(record + Q4_1::kRunsAt, 4, nullptr, 0, lane, {scale, fp16_at(record + 32, lane), 0}, to);
    case Number::kQ4_K:
      for (uint32_t run = 0; run < Q4_K::kRuns; ++run) {
        const char* lines = record + Q4_K::kRunsAt + run * Q4_K::kRunBytes;
        unpack_nibbles(lines, 4, nullptr, 0, lane, six_bit_scale(record, lane, run), to + 32 * run);
      }
      return;
    case Number::kQ5_K:
      for (uint32_t run = 0; run < Q5_K::kRuns; ++run) {
        const char* lines = record + Q5_K::kRunsAt + run * Q5_K::kRunBytes;
        unpack_nibbles(lines + 64, 4, lines, 1, lane, six_bit_scale(record, lane, run), to + 32 * run);
      }
      return;
    case Number::kQ6_K:
      for (uint32_t run = 0; run < Q6_K::kRuns; ++run) {
        const char* lines = record + Q6_K::kRunsAt + run * Q6_K::kRunBytes;
        const auto s = static_cast<int32_t>(word_at(record + 32 + run / 4 * 64, lane) << (24 - 8 * (run % 4))) >> 24;
        unpack_nibbles(lines + 64, 2, lines, 2, lane, {scale * static_cast<float>(s), 0.0f, 32}, to + 16 * run);
      }
      return;
    default:
      return;
  }
}

void unpack_rows(const UnpackCall& call) {
  const Block block = block_of(call.number);
  const std::size_t bytes_per_row = row_bytes(call.number, call.num_in);
  for (std::size_t i = 0; i < call.num_rows; ++i) {
    const auto row = static_cast<std::size_t>(call.indices[i]);
    const auto* record = reinterpret_cast<const char*>(call.packed) + row / kGroupRows * kGroupRows * bytes_per_row;
    float* to = call.to + i * call.num_in;
    for (std::size_t k = 0; k < call.num_in; k += block.numbers, record += kGroupRows * block.bytes) {
      unpack_block(call.number, record, row % kGroupRows, to + k);
    }
  }
}

}  // namespace ambidex::AMBIDEX_ISA
