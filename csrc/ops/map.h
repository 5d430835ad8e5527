// Ops number by number over arrays with strides, in the calling thread: what a step does between its products and its
// attention, and what a program (core/program.h) needs in place of another library's ops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/isa.h"

namespace ambidex {

constexpr std::size_t kMapDims = 4;

// What arrays hold.
enum class Element { kFp32, kBf16, kFp16, kInt64 };

struct MapShape {
  std::size_t sizes[kMapDims];
};

// An array as an op of a shape reads it: strides in elements, 0 along axes that are repeated.
struct MapInput {
  const void* data;
  std::ptrdiff_t strides[kMapDims];
};

enum class Unary { kCopy, kCos, kSin, kRelu, kGelu, kSilu };
enum class Binary { kAdd, kMultiply };

// y: contiguous. x is widened to fp32 first. gelu is x * Phi(x).
void map_to_fp32(Isa isa, Unary op, const MapShape& shape, Element element, const MapInput& x, float* y);
void map_fp32(Isa isa, Binary op, const MapShape& shape, const MapInput& a, const MapInput& b, float* y);

// Numbers of `size` bytes (1, 2, 4, 8) as they are, to y with strides (in elements).
void copy_elements(const MapShape& shape, std::size_t size, const MapInput& x, void* y, const std::ptrdiff_t* y_strides);

// y[i] = x[i] + term.
void add_int64(const std::int64_t* x, std::int64_t term, std::size_t num, std::int64_t* y);

// Rows ids[0], ids[1], … of a table [num_rows, row_bytes]. Throws std::invalid_argument for an id outside.
void gather_table_rows(const char* table, std::size_t num_rows, std::size_t row_bytes, const std::int64_t* ids,
                       std::size_t num_ids, char* y);

}  // namespace ambidex
