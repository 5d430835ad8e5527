// Body of picked.h, compiled once per instruction set (per_isa.cpp).
#pragma once

#include "ops/picked.h"
#include "simd/dot.h"

namespace ambidex::AMBIDEX_ISA {

void lay_out_picked(Number number, const float* x, std::size_t width, float* to) {
  if (number != Number::kBf16) {
    memcpy(to, x, width * sizeof(float));
    return;
  }
  for (std::size_t k = 0; k < width; k += 2 * Wide::kLanes) {
    Wide halves[2];
    split_pairs(x + k, halves);
    halves[0].store(to + k);
    halves[1].store(to + k + Wide::kLanes);
  }
}

void put_back_picked(Number number, const float* y, std::size_t width, float* to) {
  if (number != Number::kBf16) {
    memcpy(to, y, width * sizeof(float));
    return;
  }
  for (std::size_t k = 0; k < width; k += 2 * Wide::kLanes) {
    for (std::size_t i = 0; i < Wide::kLanes; ++i) {
      to[k + 2 * i] = y[k + i];
      to[k + 2 * i + 1] = y[k + Wide::kLanes + i];
    }
  }
}

// A row begins anywhere: the processor's own prefetching needs some lines to see a run.
constexpr std::size_t kPickedAhead = 1024;

template <class W>
inline void ask_for_row(const W* row, std::size_t width) {
  const char* const bytes = reinterpret_cast<const char*>(row);
  for (std::size_t i = 0; i < kPickedAhead && i < width * sizeof(W); i += 64) prefetch(bytes + i);
}

template <class W>
inline float dot_row(const W* row, const float* x, std::size_t width) {
  constexpr std::size_t kLanes = Wide::kLanes;
  Wide sums[4] = {Wide::zero(), Wide::zero(), Wide::zero(), Wide::zero()};
  for (std::size_t k = 0; k < width; k += 4 * kLanes) {
    Wide first[2], second[2];
    widen(row + k, first);
    widen(row + k + 2 * kLanes, second);
    sums[0] = mul_add(first[0], Wide::load(x + k), sums[0]);
    sums[1] = mul_add(first[1], Wide::load(x + k + kLanes), sums[1]);
    sums[2] = mul_add(second[0], Wide::load(x + k + 2 * kLanes), sums[2]);
    sums[3] = mul_add(second[1], Wide::load(x + k + 3 * kLanes), sums[3]);
  }
  return (sum_of(sums[0]) + sum_of(sums[1])) + (sum_of(sums[2]) + sum_of(sums[3]));
}

template <class W>
inline void add_row(const W* row, float factor, std::size_t width, float* y) {
  float same[Wide::kLanes];
  for (float& one : same) one = factor;
  const Wide factors = Wide::load(same);
  for (std::size_t k = 0; k < width; k += 2 * Wide::kLanes) {
    Wide halves[2];
    widen(row + k, halves);
    mul_add(halves[0], factors, Wide::load(y + k)).store(y + k);
    mul_add(halves[1], factors, Wide::load(y + k + Wide::kLanes)).store(y + k + Wide::kLanes);
  }
}

template <class W>
void add_picked_of(const PickedRange& range) {
  const PickedCall& call = *range.call;
  const W* const table = static_cast<const W*>(call.table);
  const std::size_t width = call.width;
  for (std::size_t i = range.begin; i < range.end; ++i) {
    if (i + 1 < range.end) ask_for_row(table + static_cast<std::size_t>(call.in_rows[i + 1]) * width, width);
    float h = dot_row(table + static_cast<std::size_t>(call.in_rows[i]) * width, range.x, width);
    if (call.biases != nullptr) h += call.biases[i];
    if (h <= 0.0f) h = 0.0f;  // what is no number stays what it is
    call.h[i] = h;
    if (h != 0.0f) add_row(table + static_cast<std::size_t>(call.out_rows[i]) * width, h, width, range.y);
  }
}

void add_picked(const PickedRange& range) {
  switch (range.call->number) {
    case Number::kBf16:
      return add_picked_of<Bf16>(range);
    case Number::kFp16:
      return add_picked_of<Fp16>(range);
    default:
      return add_picked_of<float>(range);
  }
}

}  // namespace ambidex::AMBIDEX_ISA
