// Rows of 4-bit numbers in groups of 16 dims that have a step and a zero each:
//
//   row[d] = scale * whole[d]      whole[d] = zero[g] + step[g] * number[d], an int8      g = d / 16, number 0 … 15
//
// so a packed row is a row of int8 in fewer bytes. A byte holds the numbers of two dims, 16 apart: byte 16 i + j those of
// dims 32 i + j (low half) and 32 i + 16 + j. Beside a row stand W words of 4 bytes: the scale in fp32, then for each two
// groups step, zero, step, zero, a byte each. A block's words are [W][P]: those of a token lie P words apart.
//
// Source: asymmetric round-to-nearest in groups, FlexGen (arXiv:2303.06865, section 4), with steps and zeros whole
// multiples of an int8 row's scale.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/isa.h"

namespace ambidex {

constexpr std::size_t kInt4Group = 16;

// Words beside a row of so many numbers, a multiple of 32.
constexpr std::size_t words_of(std::size_t padded_dim) { return 1 + padded_dim / (2 * kInt4Group); }

// One row: bytes [padded_dim / 2]; its words go to words[0], words[stride], … Dims from head_dim on are taken for 0.
void pack_row(Isa isa, const float* x, std::size_t head_dim, std::size_t padded_dim, std::uint8_t* bytes, float* words,
              std::size_t stride);

}  // namespace ambidex
