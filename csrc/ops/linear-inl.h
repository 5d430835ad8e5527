// Body of linear, compiled once per instruction set (per_isa.cpp).
//
//   y[t, n] = sum over k of x[t, k] * W[n, k]  (+ bias[n]) (+ residual[t, n])        products and sums in fp32
//
// A block of rows and tokens is summed in registers: each weight that is widened meets all tokens of the block, each
// vector of x all its rows. The rows of a range lie in the second cache by the time the next block of tokens comes.
#pragma once

#include "ops/linear.h"
#include "ops/quant-inl.h"
#include "simd/dot.h"

namespace ambidex::AMBIDEX_ISA {

constexpr std::size_t kStep = 2 * Wide::kLanes;  // numbers that are widened at a time

// How far ahead of the block weights are asked for, in bytes. The rows of a block lie side by side, but are read side by
// side, too, which the processor's own prefetching takes for several short runs: with rows of 576 bf16 one thread of an
// AVX2 EPYC read 8.5 GB/s without and 12 with it, for any distance of 2 to 16 KiB (4096 columns: 16 and 18).
constexpr std::size_t kAhead = 4096;

inline std::size_t widened_width(std::size_t num_in) { return (num_in + kStep - 1) / kStep * kStep; }

std::size_t packed_width(Number number, std::size_t num_in) {
  return is_quantized(number) ? quant_token_width(num_in) : widened_width(num_in);
}

void pack_tokens(Number number, const float* x, std::size_t num_tokens, std::size_t num_in, float* packed) {
  if (is_quantized(number)) return pack_quant_tokens(x, num_tokens, num_in, packed);
  const std::size_t width = widened_width(num_in);
  for (std::size_t t = 0; t < num_tokens; ++t, x += num_in, packed += width) {
    if (number != Number::kBf16) {
      memcpy(packed, x, num_in * sizeof(float));
      memset(packed + num_in, 0, (width - num_in) * sizeof(float));
      continue;
    }
    Wide halves[2];
    for (std::size_t k = 0; k < width; k += kStep) {
      float rest[kStep] = {};
      if (k + kStep > num_in) memcpy(rest, x + k, (num_in - k) * sizeof(float));
      split_pairs(k + kStep > num_in ? rest : x + k, halves);
      halves[0].store(packed + k);
      halves[1].store(packed + k + Wide::kLanes);
    }
  }
}

template <class W, std::size_t kRows, std::size_t kTokens>
inline void add_step(const W* const (&rows)[kRows], const float* x, std::size_t width, Wide (&sums)[kRows][kTokens]) {
  Wide w[kRows][2];
  for (std::size_t r = 0; r < kRows; ++r) widen(rows[r], w[r]);
  for (std::size_t t = 0; t < kTokens; ++t) {
    for (std::size_t half = 0; half < 2; ++half) {
      const Wide x_half = Wide::load(x + t * width + half * Wide::kLanes);
      for (std::size_t r = 0; r < kRows; ++r) sums[r][t] = mul_add(w[r][half], x_half, sums[r][t]);
    }
  }
}

// kRows rows of W times kTokens tokens.
template <class W, std::size_t kRows, std::size_t kTokens>
inline void multiply_block(const LinearRange& range, std::size_t first_row, std::size_t first_token) {
  const std::size_t num_in = range.num_in, width = widened_width(num_in);
  const W* const weight = static_cast<const W*>(range.weight) + first_row * num_in;
  const float* const x = range.x + first_token * width;
  Wide sums[kRows][kTokens];
  for (auto& row : sums) {
    for (Wide& sum : row) sum = Wide::zero();
  }
  const W* rows[kRows];
  const char* ahead = reinterpret_cast<const char*>(weight) + kAhead;
  std::size_t k = 0;
  for (; k + kStep <= num_in; k += kStep) {
    for (std::size_t i = 0; i < kRows * kStep * sizeof(W); i += 64) prefetch(ahead + i);
    ahead += kRows * kStep * sizeof(W);
    for (std::size_t r = 0; r < kRows; ++r) rows[r] = weight + r * num_in + k;
    add_step<W>(rows, x + k, width, sums);
  }
  if (k < num_in) {
    W rest[kRows][kStep] = {};
    for (std::size_t r = 0; r < kRows; ++r) {
      memcpy(rest[r], weight + r * num_in + k, (num_in - k) * sizeof(W));
      rows[r] = rest[r];
    }
    add_step<W>(rows, x + k, width, sums);
  }
  for (std::size_t t = 0; t < kTokens; ++t) {
    const std::size_t at = (first_token + t) * range.y_stride + first_row;
    for (std::size_t r = 0; r < kRows; ++r) {
      float y = sum_of(sums[r][t]);
      if (range.bias != nullptr) y += range.bias[first_row + r];
      if (range.residual != nullptr) y += range.residual[at + r];
      range.y[at + r] = y;
    }
  }
}

template <class W, std::size_t kRows, std::size_t kTokens>
void multiply_tokens(const LinearRange& range, std::size_t first_token) {
  std::size_t row = 0;
  for (; row + kRows <= range.num_rows; row += kRows) multiply_block<W, kRows, kTokens>(range, row, first_token);
  for (; row < range.num_rows; ++row) multiply_block<W, 1, kTokens>(range, row, first_token);
}

// Sums that stay in registers: 16 of the 32 of AVX-512, 8 of 16 elsewhere (beside them the widened weights and a vector
// of x); fewer than 8 would wait for each other (4 cycles, two additions a cycle).
template <class W>
void multiply_range_of(const LinearRange& range) {
  constexpr std::size_t kManyRows = Wide::kLanes == 16 ? 4 : 2;
  std::size_t token = 0;
  for (; token + 4 <= range.num_tokens; token += 4) multiply_tokens<W, kManyRows, 4>(range, token);
  switch (range.num_tokens - token) {
    case 3:
      return multiply_tokens<W, kManyRows, 3>(range, token);
    case 2:
      return multiply_tokens<W, kManyRows, 2>(range, token);
    case 1:
      return multiply_tokens<W, 4, 1>(range, token);
    default:
      return;
  }
}

void multiply_range(const LinearRange& range) {
  switch (range.number) {
    case Number::kBf16:
      return multiply_range_of<Bf16>(range);
    case Number::kFp16:
      return multiply_range_of<Fp16>(range);
    case Number::kFp32:
      return multiply_range_of<float>(range);
    default:
      return multiply_quant_range(range);
  }
}

}  // namespace ambidex::AMBIDEX_ISA
