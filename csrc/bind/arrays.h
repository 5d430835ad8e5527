// Typed arrays as bindings take them, and the checks that several share. For the bindings only.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string_view>

#include "core/check.h"
#include "core/number.h"
#include "simd/isa.h"

namespace ambidex {

template <class Scalar, std::size_t kDims>
using Array = nanobind::ndarray<Scalar, nanobind::ndim<kDims>, nanobind::c_contig, nanobind::device::cpu>;

// Stored numbers are plain bytes here (numpy has no bf16): what they are says a name.
template <std::size_t kDims>
using Bytes = nanobind::ndarray<nanobind::ndim<kDims>, nanobind::c_contig, nanobind::device::cpu>;
template <std::size_t kDims>
using ConstBytes = nanobind::ndarray<nanobind::ro, nanobind::ndim<kDims>, nanobind::c_contig, nanobind::device::cpu>;

inline Number find_number(std::string_view name) {
  if (name == "fp32") return Number::kFp32;
  if (name == "bf16") return Number::kBf16;
  if (name == "fp16") return Number::kFp16;
  if (name == "int4") return Number::kInt4;
  AMBIDEX_CHECK(name == "int8", "number: expected fp32, bf16, fp16, int8 or int4, got \"", name, "\"");
  return Number::kInt8;
}

inline Number find_quantized(std::string_view name) {
  if (name == "Q8_0") return Number::kQ8_0;
  if (name == "Q4_0") return Number::kQ4_0;
  if (name == "Q4_1") return Number::kQ4_1;
  if (name == "Q4_K") return Number::kQ4_K;
  if (name == "Q5_K") return Number::kQ5_K;
  AMBIDEX_CHECK(name == "Q6_K", "type: expected Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K, got \"", name, "\"");
  return Number::kQ6_K;
}

inline Isa choose_isa(std::optional<std::string_view> isa) { return isa ? find_isa(*isa) : best_isa(); }

template <class A>
void check_itemsize(const char* name, const A& array, std::size_t size) {
  AMBIDEX_CHECK(array.itemsize() == size, name, ": expected numbers of ", size, " bytes, got ", array.itemsize());
}

template <class A>
void check_size(const char* name, const char* axis, const A& array, std::size_t dim, std::size_t size) {
  AMBIDEX_CHECK(array.shape(dim) == size, name, ": expected ", size, " for ", axis, " (axis ", dim, "), got ",
                array.shape(dim));
}

}  // namespace ambidex
