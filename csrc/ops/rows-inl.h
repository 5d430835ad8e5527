// Bodies of the ops over rows, compiled once per instruction set (per_isa.cpp).
#pragma once

#include <math.h>
#include <string.h>

#include "ops/rows.h"
#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

// Source: arXiv:1910.07467.
void rms_norm(const float* x, const float* weight, float eps, std::size_t num_rows, std::size_t width, float* y) {
  for (std::size_t row = 0; row < num_rows; ++row, x += width, y += width) {
    Lanes first = Lanes::zero(), second = Lanes::zero();
    std::size_t i = 0;
    for (; i + 32 <= width; i += 32) {
      const Lanes a = Lanes::load(x + i), b = Lanes::load(x + i + 16);
      first = mul_add(a, a, first);
      second = mul_add(b, b, second);
    }
    float rest[32] = {};
    memcpy(rest, x + i, (width - i) * sizeof(float));
    const Lanes a = Lanes::load(rest), b = Lanes::load(rest + 16);
    const float sum = sum_of(mul_add(a, a, first) + mul_add(b, b, second));
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
    for (std::size_t k = 0; k < width; ++k) y[k] = x[k] * scale * weight[k];
  }
}

// Source: arXiv:1607.06450, equation 4.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, std::size_t num_rows,
                std::size_t width, float* y) {
  for (std::size_t row = 0; row < num_rows; ++row, x += width, y += width) {
    float sums[16] = {}, squares[16] = {};
    for (std::size_t i = 0; i < width; i += 16) {
      const std::size_t end = width - i < 16 ? width - i : 16;
      for (std::size_t k = 0; k < end; ++k) sums[k] += x[i + k];
    }
    const float mean = sum_of(Lanes::load(sums)) / static_cast<float>(width);
    for (std::size_t i = 0; i < width; i += 16) {
      const std::size_t end = width - i < 16 ? width - i : 16;
      for (std::size_t k = 0; k < end; ++k) squares[k] += (x[i + k] - mean) * (x[i + k] - mean);
    }
    const float scale = 1.0f / sqrtf(sum_of(Lanes::load(squares)) / static_cast<float>(width) + eps);
    for (std::size_t k = 0; k < width; ++k) {
      const float z = (x[k] - mean) * scale * weight[k];
      y[k] = bias == nullptr ? z : z + bias[k];
    }
  }
}

// Blocks are compared by their largest number first; the one that holds the largest is then looked at number by number.
// x * 0 is NaN for what is not finite, and stays so in a sum.
int64_t likeliest_of(const float* x, std::size_t width) {
  constexpr std::size_t kBlock = 256;
  float best = -3.4e38f;
  std::size_t best_block = 0;
  Lanes faults = Lanes::zero();
  float fault = 0.0f;
  for (std::size_t begin = 0; begin < width; begin += kBlock) {
    const std::size_t num = width - begin < kBlock ? width - begin : kBlock;
    Lanes largest = Lanes::broadcast(-3.4e38f);
    std::size_t i = 0;
    for (; i + 16 <= num; i += 16) {
      const Lanes line = Lanes::load(x + begin + i);
      largest = larger(largest, line);
      faults = mul_add(line, Lanes::zero(), faults);
    }
    float block_best = largest_of(largest);
    for (; i < num; ++i) {
      block_best = x[begin + i] > block_best ? x[begin + i] : block_best;
      fault += x[begin + i] * 0.0f;
    }
    if (block_best > best) {
      best = block_best;
      best_block = begin;
    }
  }
  fault += sum_of(faults);
  if (fault != 0.0f) return -1;  // NaN
  for (std::size_t i = best_block; i < width; ++i) {
    if (x[i] == best) return static_cast<int64_t>(i);
  }
  return width == 0 ? -1 : static_cast<int64_t>(best_block);  // all are below the first bound
}

void narrow(const float* x, std::size_t num, Number number, void* y) {
  switch (number) {
    case Number::kBf16:
      for (std::size_t i = 0; i < num; ++i) static_cast<Bf16*>(y)[i] = to_bf16(x[i]);
      return;
    case Number::kFp16:
      for (std::size_t i = 0; i < num; ++i) static_cast<Fp16*>(y)[i] = to_fp16(x[i]);
      return;
    default:
      memcpy(y, x, num * sizeof(float));
  }
}

float quantize_row(const float* x, std::size_t num, int8_t* y) {
  float largest = 0.0f;
  for (std::size_t i = 0; i < num; ++i) {
    const float size = fabsf(x[i]);
    largest = size > largest || size != size ? size : largest;
  }
  const float scale = largest / 127.0f;
  const float divisor = scale < 0x1p-126f ? 0x1p-126f : scale;  // the smallest normal number: rows of zeros give zeros
  for (std::size_t i = 0; i < num; ++i) {
    const float whole = rintf(x[i] / divisor);
    y[i] = whole >= -127.0f && whole <= 127.0f ? static_cast<int8_t>(whole) : int8_t{0};  // 0 for NaN
  }
  return scale;
}

// silu(g) = g / (1 + exp(-g)). Below -87 the exponent is held at 126: the result then is as good as 0.
inline void silu_mul_line(const float* gate, const float* up, float* y) {
  constexpr float kLog2E = 1.44269504088896341f;
  float e[16];
  const Lanes exponent = larger(Lanes::broadcast(-126.0f), Lanes::load(gate) * Lanes::broadcast(kLog2E));
  exp2_of(exponent * Lanes::broadcast(-1.0f)).store(e);
  for (int k = 0; k < 16; ++k) y[k] = gate[k] / (1.0f + e[k]) * up[k];
}

void silu_mul(const float* gate, const float* up, std::size_t num, float* __restrict__ y) {
  std::size_t i = 0;
  for (; i + 16 <= num; i += 16) silu_mul_line(gate + i, up + i, y + i);
  if (i == num) return;
  float g[16] = {}, u[16] = {};
  memcpy(g, gate + i, (num - i) * sizeof(float));
  memcpy(u, up + i, (num - i) * sizeof(float));
  silu_mul_line(g, u, g);
  memcpy(y + i, g, (num - i) * sizeof(float));
}

void rotate(const Rotation& rotation, const float* x, float* y) {
  const std::size_t half = rotation.half, rest = rotation.head_dim - 2 * half;
  for (std::size_t t = 0; t < rotation.num_tokens; ++t) {
    const float* __restrict__ cos = rotation.cos + t * half;
    const float* __restrict__ sin = rotation.sin + t * half;
    for (std::size_t head = 0; head < rotation.num_heads; ++head, x += rotation.head_dim, y += rotation.head_dim) {
      const float* __restrict__ from = x;
      float* __restrict__ to = y;
      for (std::size_t i = 0; i < half; ++i) {
        const float first = from[i], second = from[half + i];
        to[i] = first * cos[i] - second * sin[i];
        to[half + i] = second * cos[i] + first * sin[i];
      }
      memcpy(to + 2 * half, from + 2 * half, rest * sizeof(float));
    }
  }
}

}  // namespace ambidex::AMBIDEX_ISA
