// merge_states: join partial attention answers over disjoint sets of keys.
#pragma once

#include <cstddef>

#include "simd/isa.h"

namespace ambidex {

struct ConstState {
  const float* out;  // [rows, dim], row-major
  const float* lse;  // [rows], natural log; -inf where no key was seen
};

struct State {
  float* out;  // [rows, dim], row-major
  float* lse;  // [rows]
};

// Where both sides saw no key, out is 0 and lse -inf. The out of a side that saw no key is not read. An lse of NaN or
// +inf is never hidden: the merged lse is NaN or +inf too. `merged` may be `a` or `b`, but not overlap them in part.
// Allocates nothing; runs in the calling thread; moves 3 * rows * dim floats.
void merge_states(Isa isa, ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim);

}  // namespace ambidex
