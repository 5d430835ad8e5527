#include "ops/kv_int4.h"

#include <algorithm>
#include <cstring>

#include "ops/kv_rows.h"
#include "ops/rows.h"

namespace ambidex {
namespace {

constexpr int kMost = 15;      // the largest number
constexpr int kLargest = 127;  // of an int8 row

struct Grid {
  int step, zero;
};

// The finest grid of 16 numbers over a group, none of them beyond 127.
Grid find_grid(const std::int8_t* whole) {
  const auto [low, high] = std::minmax_element(whole, whole + kInt4Group);
  const int step = std::max(1, (*high - *low + kMost - 1) / kMost);
  return {step, std::min<int>(*low, kLargest - kMost * step)};
}

// To the nearest, up where two are as near.
std::uint8_t number_of(std::int8_t whole, Grid grid) {
  return static_cast<std::uint8_t>((2 * (whole - grid.zero) + grid.step) / (2 * grid.step));
}

}  // namespace

void pack_row(Isa isa, const float* x, std::size_t head_dim, std::size_t padded_dim, std::uint8_t* bytes, float* words,
              std::size_t stride) {
  std::int8_t whole[kLargestDim];
  words[0] = quantize_row(isa, x, head_dim, whole);
  std::fill(whole + head_dim, whole + padded_dim, std::int8_t{0});
  for (std::size_t pair = 0; pair < padded_dim / (2 * kInt4Group); ++pair) {
    const std::int8_t* low = whole + 2 * kInt4Group * pair;
    const std::int8_t* high = low + kInt4Group;
    const Grid a = find_grid(low), b = find_grid(high);
    for (std::size_t j = 0; j < kInt4Group; ++j) {
      bytes[kInt4Group * pair + j] = static_cast<std::uint8_t>(number_of(low[j], a) | number_of(high[j], b) << 4);
    }
    const std::uint8_t word[4] = {static_cast<std::uint8_t>(a.step), static_cast<std::uint8_t>(a.zero),
                                  static_cast<std::uint8_t>(b.step), static_cast<std::uint8_t>(b.zero)};
    std::memcpy(words + (1 + pair) * stride, word, sizeof word);
  }
}

}  // namespace ambidex
