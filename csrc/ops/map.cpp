#include "ops/map.h"

#include <cstring>

#include "core/check.h"
#include "simd/call.h"

namespace ambidex {

// Defined in map-inl.h.
#define AMBIDEX_DECLARE_MAP(isa)                                                                                     \
  namespace isa {                                                                                                    \
  void map_line_to_fp32(Unary op, Element element, const void* x, std::ptrdiff_t offset, std::ptrdiff_t stride,      \
                        std::size_t num, float* y);                                                                  \
  void map_line_fp32(Binary op, const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride,    \
                     std::size_t num, float* y);                                                                     \
  }
AMBIDEX_DECLARE_MAP(generic)
AMBIDEX_DECLARE_MAP(avx2)
AMBIDEX_DECLARE_MAP(avx512)
AMBIDEX_DECLARE_MAP(avx512bf16)
AMBIDEX_DECLARE_MAP(amx)
#undef AMBIDEX_DECLARE_MAP

namespace {

void map_line_to_fp32(Isa isa, Unary op, Element element, const void* x, std::ptrdiff_t offset, std::ptrdiff_t stride,
                      std::size_t num, float* y) {
  AMBIDEX_CALL(isa, map_line_to_fp32, op, element, x, offset, stride, num, y);
}

void map_line_fp32(Isa isa, Binary op, const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride,
                   std::size_t num, float* y) {
  AMBIDEX_CALL(isa, map_line_fp32, op, a, a_stride, b, b_stride, num, y);
}

// body(i, j, k) for each line of the shape.
template <class Body>
void for_each_line(const MapShape& shape, const Body& body) {
  for (std::size_t i = 0; i < shape.sizes[0]; ++i) {
    for (std::size_t j = 0; j < shape.sizes[1]; ++j) {
      for (std::size_t k = 0; k < shape.sizes[2]; ++k) {
        body(static_cast<std::ptrdiff_t>(i), static_cast<std::ptrdiff_t>(j), static_cast<std::ptrdiff_t>(k));
      }
    }
  }
}

std::ptrdiff_t offset_of(const std::ptrdiff_t* strides, std::ptrdiff_t i, std::ptrdiff_t j, std::ptrdiff_t k) {
  return i * strides[0] + j * strides[1] + k * strides[2];
}

template <class T>
void copy_as(const MapShape& shape, const MapInput& x, void* y, const std::ptrdiff_t* y_strides) {
  for_each_line(shape, [&](std::ptrdiff_t i, std::ptrdiff_t j, std::ptrdiff_t k) {
    const T* from = static_cast<const T*>(x.data) + offset_of(x.strides, i, j, k);
    T* to = static_cast<T*>(y) + offset_of(y_strides, i, j, k);
    if (x.strides[3] == 1 && y_strides[3] == 1) {
      std::memcpy(to, from, shape.sizes[3] * sizeof(T));
      return;
    }
    for (std::size_t l = 0; l < shape.sizes[3]; ++l, from += x.strides[3], to += y_strides[3]) *to = *from;
  });
}

}  // namespace

void map_to_fp32(Isa isa, Unary op, const MapShape& shape, Element element, const MapInput& x, float* y) {
  for_each_line(shape, [&](std::ptrdiff_t i, std::ptrdiff_t j, std::ptrdiff_t k) {
    map_line_to_fp32(isa, op, element, x.data, offset_of(x.strides, i, j, k), x.strides[3], shape.sizes[3], y);
    y += shape.sizes[3];
  });
}

void map_fp32(Isa isa, Binary op, const MapShape& shape, const MapInput& a, const MapInput& b, float* y) {
  for_each_line(shape, [&](std::ptrdiff_t i, std::ptrdiff_t j, std::ptrdiff_t k) {
    map_line_fp32(isa, op, static_cast<const float*>(a.data) + offset_of(a.strides, i, j, k), a.strides[3],
                  static_cast<const float*>(b.data) + offset_of(b.strides, i, j, k), b.strides[3], shape.sizes[3], y);
    y += shape.sizes[3];
  });
}

void copy_elements(const MapShape& shape, std::size_t size, const MapInput& x, void* y, const std::ptrdiff_t* y_strides) {
  switch (size) {
    case 8:
      return copy_as<std::uint64_t>(shape, x, y, y_strides);
    case 4:
      return copy_as<std::uint32_t>(shape, x, y, y_strides);
    case 2:
      return copy_as<std::uint16_t>(shape, x, y, y_strides);
    default:
      AMBIDEX_CHECK(size == 1, "copy: expected numbers of 1, 2, 4 or 8 bytes, got ", size);
      return copy_as<std::uint8_t>(shape, x, y, y_strides);
  }
}

void add_int64(const std::int64_t* x, std::int64_t term, std::size_t num, std::int64_t* y) {
  for (std::size_t i = 0; i < num; ++i) y[i] = x[i] + term;
}

void gather_table_rows(const char* table, std::size_t num_rows, std::size_t row_bytes, const std::int64_t* ids,
                       std::size_t num_ids, char* y) {
  for (std::size_t i = 0; i < num_ids; ++i) {
    AMBIDEX_CHECK(ids[i] >= 0 && static_cast<std::size_t>(ids[i]) < num_rows, "ids: expected 0 to ", num_rows,
                  " (not included), got ", ids[i]);
    std::memcpy(y + i * row_bytes, table + static_cast<std::size_t>(ids[i]) * row_bytes, row_bytes);
  }
}

}  // namespace ambidex
