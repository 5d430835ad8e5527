#include "ops/scan_copy.h"

#include <cmath>
#include <cstring>

#include "ops/kv_rows.h"
#include "ops/rows.h"

namespace ambidex {
namespace {

// What a double that becomes a float may lose, with room.
constexpr double kRoundUp = 1.0 + 1e-6;

float widen_one(Number number, const char* at) {
  std::uint32_t bits;
  if (number == Number::kFp32) {
    float x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  if (number == Number::kInt8) return static_cast<float>(*reinterpret_cast<const std::int8_t*>(at));
  std::uint16_t half;
  std::memcpy(&half, at, sizeof half);
  float x;
  if (number == Number::kBf16) {
    bits = static_cast<std::uint32_t>(half) << 16;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) {
    bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  bits = rest << 13;
  std::memcpy(&x, &bits, sizeof x);
  x *= 0x1p112f;
  return sign != 0 ? -x : x;
}

// The row's numbers as they are stored, and as fp32, each head_dim of them; returns its length.
template <class Element>
double read_row(const ScanCopyCall& call, KVPart part, std::size_t head, std::size_t slot, Element* stored, float* row) {
  const TiledPart from{part, call.tiles, call.num_heads, call.num_blocks, call.head_dim};
  const char* records = part == KVPart::kK ? call.k : call.v;
  const float* scales = part == KVPart::kK ? call.k_scales : call.v_scales;
  const std::size_t block_size = call.tiles.block_size;
  const char* record = records + (head * call.num_blocks + slot / block_size) * call.tiles.record_bytes;
  load_row(from, reinterpret_cast<const Element*>(record), slot % block_size, stored);
  const float scale = scales == nullptr ? 1.0f : scales[head * call.num_blocks * block_size + slot];
  double sum = 0.0;
  for (std::size_t d = 0; d < call.head_dim; ++d) {
    row[d] = widen_one(call.number, reinterpret_cast<const char*>(stored + d)) * scale;
    sum += static_cast<double>(row[d]) * row[d];
  }
  return std::sqrt(sum);
}

float larger_of(float a, double b) { return b > a || std::isnan(b) ? static_cast<float>(b * kRoundUp) : a; }

template <class Element>
void keep_row(const ScanCopyCall& call, const Element* stored, Element* to) {
  std::memcpy(to, stored, call.head_dim * sizeof(Element));
  std::memset(to + call.head_dim, 0, (call.tiles.padded_dim - call.head_dim) * sizeof(Element));
}

template <class Element>
void copy_block(const ScanCopyCall& call, Isa isa, std::size_t head, std::size_t block_id) {
  const std::size_t block_size = call.tiles.block_size, padded_dim = call.tiles.padded_dim;
  const KVTiles tiles = make_tiles(1, block_size, padded_dim);
  const TiledPart to{KVPart::kK, tiles, call.num_heads, call.num_blocks, call.head_dim};
  Element stored[kLargestDim];
  float row[kLargestDim];
  std::int8_t whole[kLargestDim];
  float longest_k = 0.0f, longest_v = 0.0f;
  for (std::size_t token = 0; token < block_size; ++token) {
    const std::size_t slot = block_id * block_size + token, place = head * call.num_blocks * block_size + slot;
    auto* kept = reinterpret_cast<Element*>(call.rows) + place * 2 * padded_dim;
    longest_v = larger_of(longest_v, read_row(call, KVPart::kV, head, slot, stored, row));
    if (call.scanned != nullptr) keep_row(call, stored, kept + padded_dim);
    double norm = read_row(call, KVPart::kK, head, slot, stored, row);
    if (call.scanned != nullptr) {
      const float scale = quantize_row(isa, row, call.head_dim, whole);
      call.scales[place] = scale;
      std::int8_t* record = call.scanned + (head * call.num_blocks + block_id) * tiles.record_bytes;
      store_row(to, record, token, whole);
      keep_row(call, stored, kept);
      double sum = 0.0;
      for (std::size_t d = 0; d < call.head_dim; ++d) sum += static_cast<double>(whole[d]) * whole[d];
      norm = std::sqrt(sum) * scale;
    }
    longest_k = larger_of(longest_k, norm);
  }
  float* norms = call.norms + (head * call.num_blocks + block_id) * 2;
  norms[0] = longest_k;
  norms[1] = longest_v;
}

}  // namespace

void copy_for_scan(ThreadPool& threads, Isa isa, const ScanCopyCall& call, const std::int64_t* block_ids,
                   std::size_t num_block_ids) {
  with_element(call.tiles.element_size, [&](auto zero) {
    using Element = decltype(zero);
    parallel_for(threads, call.num_heads * num_block_ids, [&](std::size_t i) {
      copy_block<Element>(call, isa, i / num_block_ids, static_cast<std::size_t>(block_ids[i % num_block_ids]));
    });
  });
}

}  // namespace ambidex
