// Body of merge_states, compiled once per instruction set (per_isa.cpp).
//
//   m   = max(lse_a, lse_b)             w_x = exp(lse_x - m)
//   lse = m + log(w_a + w_b)            out = (w_a * out_a + w_b * out_b) / (w_a + w_b)
//
// Source: online softmax, arXiv:1805.02867.
#pragma once

#include <math.h>

#include "ops/merge.h"
#include "simd/vec.h"

namespace ambidex::AMBIDEX_ISA {

inline void fill_row(float value, float* out, std::size_t dim) {
  const Vec filling = Vec::broadcast(value);
  std::size_t i = 0;
  for (; i + Vec::kLanes <= dim; i += Vec::kLanes) filling.store(out + i);
  filling.store_first(dim - i, out + i);
}

inline void copy_row(const float* from, float* out, std::size_t dim) {
  std::size_t i = 0;
  for (; i + Vec::kLanes <= dim; i += Vec::kLanes) Vec::load(from + i).store(out + i);
  Vec::load_first(dim - i, from + i).store_first(dim - i, out + i);
}

// out = a * weight_a + b * weight_b
inline void blend_row(const float* a, float weight_a, const float* b, float weight_b, float* out, std::size_t dim) {
  const Vec wa = Vec::broadcast(weight_a);
  const Vec wb = Vec::broadcast(weight_b);
  std::size_t i = 0;
  for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
    mul_add(Vec::load(a + i), wa, Vec::load(b + i) * wb).store(out + i);
  }
  const std::size_t rest = dim - i;
  mul_add(Vec::load_first(rest, a + i), wa, Vec::load_first(rest, b + i) * wb).store_first(rest, out + i);
}

void merge_states(ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim) {
  for (std::size_t row = 0; row < rows; ++row) {
    const float* out_a = a.out + row * dim;
    const float* out_b = b.out + row * dim;
    float* out = merged.out + row * dim;
    const float lse_a = a.lse[row];
    const float lse_b = b.lse[row];
    if (lse_a == -INFINITY && lse_b == -INFINITY) {
      fill_row(0.0f, out, dim);
      merged.lse[row] = -INFINITY;
    } else if (lse_a == -INFINITY) {
      copy_row(out_b, out, dim);
      merged.lse[row] = lse_b;
    } else if (lse_b == -INFINITY) {
      copy_row(out_a, out, dim);
      merged.lse[row] = lse_a;
    } else {
      const float largest = lse_a > lse_b ? lse_a : lse_b;
      const float weight_a = expf(lse_a - largest);
      const float weight_b = expf(lse_b - largest);
      const float sum = weight_a + weight_b;
      blend_row(out_a, weight_a / sum, out_b, weight_b / sum, out, dim);
      merged.lse[row] = largest + logf(sum);
    }
  }
}

}  // namespace ambidex::AMBIDEX_ISA
