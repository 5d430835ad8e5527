// Inner loops of the ops number by number, compiled once per instruction set (per_isa.cpp).
#pragma once

#include <math.h>

#include "ops/map.h"
#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

inline float apply(Unary op, float x) {
  switch (op) {
    case Unary::kCos:
      return cosf(x);
    case Unary::kSin:
      return sinf(x);
    case Unary::kRelu:
      return x < 0.0f ? 0.0f : x;  // NaN stays
    case Unary::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case Unary::kSilu:
      return x / (1.0f + expf(-x));
    default:
      return x;
  }
}

template <class T>
inline void map_line(Unary op, const T* x, std::ptrdiff_t stride, std::size_t num, float* y) {
  for (std::size_t i = 0; i < num; ++i, x += stride) y[i] = to_float(*x);
  if (op == Unary::kCopy) return;
  for (std::size_t i = 0; i < num; ++i) y[i] = apply(op, y[i]);
}

void map_line_to_fp32(Unary op, Element element, const void* x, std::ptrdiff_t offset, std::ptrdiff_t stride,
                      std::size_t num, float* y) {
  switch (element) {
    case Element::kBf16:
      return map_line(op, static_cast<const Bf16*>(x) + offset, stride, num, y);
    case Element::kFp16:
      return map_line(op, static_cast<const Fp16*>(x) + offset, stride, num, y);
    case Element::kInt64: {
      const int64_t* from = static_cast<const int64_t*>(x) + offset;
      for (std::size_t i = 0; i < num; ++i, from += stride) y[i] = apply(op, static_cast<float>(*from));
      return;
    }
    default:
      return map_line(op, static_cast<const float*>(x) + offset, stride, num, y);
  }
}

void map_line_fp32(Binary op, const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride,
                   std::size_t num, float* __restrict__ y) {
  if (op == Binary::kAdd) {
    if (a_stride == 1 && b_stride == 1) {
      for (std::size_t i = 0; i < num; ++i) y[i] = a[i] + b[i];
    } else {
      for (std::size_t i = 0; i < num; ++i, a += a_stride, b += b_stride) y[i] = *a + *b;
    }
  } else if (a_stride == 1 && b_stride == 1) {
    for (std::size_t i = 0; i < num; ++i) y[i] = a[i] * b[i];
  } else {
    for (std::size_t i = 0; i < num; ++i, a += a_stride, b += b_stride) y[i] = *a * *b;
  }
}

}  // namespace ambidex::AMBIDEX_ISA
