// What calls of attention over tiled pools are made of, checked. For the bindings only.
#pragma once

#include <cmath>
#include <cstddef>
#include <optional>
#include <string_view>

#include "bind/arrays.h"
#include "core/check.h"
#include "ops/attention.h"
#include "ops/kv_int4.h"

namespace ambidex {

// Of int8 [Hkv, N, P], of int4 [Hkv, N, W, P].
template <class Scalar>
using ScalesOf = nanobind::ndarray<Scalar, nanobind::c_contig, nanobind::device::cpu>;
using Scales = ScalesOf<const float>;

inline std::size_t padded(std::size_t head_dim) { return (head_dim + 31) / 32 * 32; }

template <class Scalar, class Records>
Scalar* scales_of(const char* name, const std::optional<ScalesOf<Scalar>>& scales, const Records& records, Number number) {
  const bool is_int4 = number == Number::kInt4;
  AMBIDEX_CHECK(scales.has_value() == (is_int4 || number == Number::kInt8), name,
                ": scales go with int8 and int4, and with nothing else");
  if (!scales) return nullptr;
  AMBIDEX_CHECK(scales->ndim() == (is_int4 ? 4 : 3), name, ": expected ", is_int4 ? "Hkv N W P" : "Hkv N P", ", got ",
                scales->ndim(), " axes");
  for (std::size_t axis = 0; axis < 2; ++axis) check_size(name, "Hkv N", *scales, axis, records.shape(axis));
  if (is_int4) check_size(name, "words of a row", *scales, 2, words_of(2 * records.shape(3)));
  check_size(name, "P", *scales, is_int4 ? 3 : 2, records.shape(2));
  return scales->data();
}

// Numbers of a row in an array whose rows have so many elements.
inline std::size_t row_numbers(Number number, std::size_t elements) {
  return number == Number::kInt4 ? 2 * elements : elements;
}

// All but the keys.
inline AttendCall make_call(const ConstBytes<3>& q, std::string_view q_number, const ConstBytes<4>& k,
                            const ConstBytes<4>& v, std::string_view k_name, std::string_view v_name,
                            const std::optional<Scales>& k_scales, const std::optional<Scales>& v_scales, float scale,
                            const Array<float, 3>& out, const Array<float, 2>& lse) {
  AttendCall call{};
  const Number k_number = find_number(k_name), v_number = find_number(v_name);
  call.is_k_packed = k_number == Number::kInt4;
  call.is_v_packed = v_number == Number::kInt4;
  call.number = call.is_k_packed ? Number::kInt8 : k_number;
  AMBIDEX_CHECK(call.number == (call.is_v_packed ? Number::kInt8 : v_number), "numbers: K in ", k_name, " and V in ",
                v_name, " do not go together: expected one format, or int8 and int4");
  call.q_number = find_number(q_number);
  AMBIDEX_CHECK(call.q_number != Number::kInt8 && call.q_number != Number::kInt4, "q: expected fp32, bf16 or fp16, got ",
                q_number);
  check_itemsize("q", q, size_of(call.q_number));
  check_itemsize("k", k, size_of(k_number));
  check_itemsize("v", v, size_of(v_number));
  call.tiles = make_tiles(k.itemsize(), k.shape(2), row_numbers(k_number, k.shape(3)));
  for (std::size_t axis = 0; axis < 3; ++axis) check_size("v", "an axis of k", v, axis, k.shape(axis));
  AMBIDEX_CHECK(row_numbers(v_number, v.shape(3)) == call.tiles.padded_dim, "v: expected rows of ", call.tiles.padded_dim,
                " numbers as k has, got ", row_numbers(v_number, v.shape(3)));
  call.num_kv_heads = k.shape(0);
  call.num_blocks = k.shape(1);
  const std::size_t num_q_heads = q.shape(1);
  AMBIDEX_CHECK(call.num_kv_heads >= 1 && num_q_heads >= 1 && num_q_heads % call.num_kv_heads == 0, "q: has ", num_q_heads,
                " heads, not a multiple of the ", call.num_kv_heads, " of k");
  call.group_size = num_q_heads / call.num_kv_heads;
  call.head_dim = q.shape(2);
  AMBIDEX_CHECK(padded(call.head_dim) == call.tiles.padded_dim, "k: expected rows of ", padded(call.head_dim),
                " numbers, head_dim padded to a multiple of 32, got ", call.tiles.padded_dim);
  for (std::size_t axis = 0; axis < 3; ++axis) check_size("out", "an axis of q", out, axis, q.shape(axis));
  for (std::size_t axis = 0; axis < 2; ++axis) check_size("lse", "an axis of q", lse, axis, q.shape(axis));
  AMBIDEX_CHECK(std::isfinite(scale) && scale > 0.0f, "scale: expected a positive number, got ", scale);
  call.k_scales = scales_of("k_scales", k_scales, k, k_number);
  call.v_scales = scales_of("v_scales", v_scales, v, v_number);
  call.k = static_cast<const char*>(k.data());
  call.v = static_cast<const char*>(v.data());
  call.q = q.data();
  call.scale = scale;
  call.num_rows = q.shape(0);
  call.out = out.data();
  call.lse = lse.data();
  return call;
}

inline void check_batch(const AttendCall& call, const KeyBatch& batch) {
  AMBIDEX_CHECK(call.slopes == nullptr || batch.has_positions() || call.num_rows == 0,
                "slopes: the batch has no positions");
  AMBIDEX_CHECK(batch.num_rows() == call.num_rows, "q: expected ", batch.num_rows(),
                " for the rows of the batch (axis 0), got ", call.num_rows);
  AMBIDEX_CHECK(batch.block_size() == call.tiles.block_size, "batch: made for blocks of ", batch.block_size(),
                " tokens, k has ", call.tiles.block_size);
  AMBIDEX_CHECK(batch.num_pool_blocks() <= call.num_blocks, "batch: names block ", batch.num_pool_blocks() - 1,
                ", k has ", call.num_blocks, " blocks");
}

}  // namespace ambidex
