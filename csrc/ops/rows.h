// Cheap ops over rows of fp32, in the calling thread: for steps of few tokens, where starting an op costs more than it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/number.h"
#include "simd/isa.h"

namespace ambidex {

// y = x / sqrt(mean(x²) + eps) * weight for each row; x, y: [num_rows, width]; weight: [width].
void rms_norm(Isa isa, const float* x, const float* weight, float eps, std::size_t num_rows, std::size_t width,
              float* y);

// y = (x - mean) / sqrt(variance + eps) * weight + bias for each row; bias may be null.
void layer_norm(Isa isa, const float* x, const float* weight, const float* bias, float eps, std::size_t num_rows,
                std::size_t width, float* y);

// y = silu(gate) * up, element by element.
void silu_mul(Isa isa, const float* gate, const float* up, std::size_t num, float* y);

// Turns the first 2 * half numbers of each head, (i, i + half) being a pair; x, y: [num_tokens, num_heads, head_dim];
// cos, sin: [num_tokens, half]. Numbers behind stay as they are.
struct Rotation {
  const float *cos, *sin;
  std::size_t half, num_tokens, num_heads, head_dim;
};
void rotate(Isa isa, const Rotation& rotation, const float* x, float* y);

// The first place of the largest number of each row of x [num_rows, width]; -1 if a number is NaN or infinite.
void likeliest(Isa isa, const float* x, std::size_t num_rows, std::size_t width, std::int64_t* places);

// Rounds to nearest, ties to even; y holds numbers of the kind (not int8).
void narrow(Isa isa, const float* x, std::size_t num, Number number, void* y);

// One row in 8-bit integers: returns scale = max |x| / 127; y = x / scale, rounded to nearest.
float quantize_row(Isa isa, const float* x, std::size_t num, std::int8_t* y);

}  // namespace ambidex
