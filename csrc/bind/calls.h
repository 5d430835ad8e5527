// What calls of attention over tiled pools are made of, checked. For the bindings only.
#pragma once

#include <cmath>
#include <cstddef>
#include <optional>
#include <string_view>

#include "bind/arrays.h"
#include "core/check.h"
#include "ops/attention.h"

namespace ambidex {

using Scales = Array<const float, 3>;

inline std::size_t padded(std::size_t head_dim) { return (head_dim + 31) / 32 * 32; }

inline const float* scales_of(const char* name, const std::optional<Scales>& scales, const ConstBytes<4>& records,
                              bool is_int8) {
  AMBIDEX_CHECK(scales.has_value() == is_int8, name, ": scales go with int8 and with nothing else");
  if (!is_int8) return nullptr;
  for (std::size_t axis = 0; axis < 3; ++axis) check_size(name, "Hkv N P", *scales, axis, records.shape(axis));
  return scales->data();
}

// All but the keys.
inline AttendCall make_call(const ConstBytes<3>& q, std::string_view q_number, const ConstBytes<4>& k,
                            const ConstBytes<4>& v, std::string_view number, const std::optional<Scales>& k_scales,
                            const std::optional<Scales>& v_scales, float scale, const Array<float, 3>& out,
                            const Array<float, 2>& lse) {
  AttendCall call{};
  call.number = find_number(number);
  call.q_number = find_number(q_number);
  AMBIDEX_CHECK(call.q_number != Number::kInt8, "q: expected fp32, bf16 or fp16, got int8");
  check_itemsize("q", q, size_of(call.q_number));
  check_itemsize("k", k, size_of(call.number));
  check_itemsize("v", v, size_of(call.number));
  call.tiles = make_tiles(k.itemsize(), k.shape(2), k.shape(3));
  for (std::size_t axis = 0; axis < 4; ++axis) check_size("v", "an axis of k", v, axis, k.shape(axis));
  call.num_kv_heads = k.shape(0);
  call.num_blocks = k.shape(1);
  const std::size_t num_q_heads = q.shape(1);
  AMBIDEX_CHECK(call.num_kv_heads >= 1 && num_q_heads >= 1 && num_q_heads % call.num_kv_heads == 0, "q: has ", num_q_heads,
                " heads, not a multiple of the ", call.num_kv_heads, " of k");
  call.group_size = num_q_heads / call.num_kv_heads;
  call.head_dim = q.shape(2);
  check_size("k", "head_dim, padded to a multiple of 32", k, 3, padded(call.head_dim));
  for (std::size_t axis = 0; axis < 3; ++axis) check_size("out", "an axis of q", out, axis, q.shape(axis));
  for (std::size_t axis = 0; axis < 2; ++axis) check_size("lse", "an axis of q", lse, axis, q.shape(axis));
  AMBIDEX_CHECK(std::isfinite(scale) && scale > 0.0f, "scale: expected a positive number, got ", scale);
  const bool is_int8 = call.number == Number::kInt8;
  call.k_scales = scales_of("k_scales", k_scales, k, is_int8);
  call.v_scales = scales_of("v_scales", v_scales, v, is_int8);
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
