#include "ops/kv_tiles.h"

#include <algorithm>

#include "core/check.h"
#include "ops/kv_int4.h"
#include "ops/kv_rows.h"
#include "ops/rows.h"

namespace ambidex {

// Of records that a thread takes at a time to copy rows out of them: some 10 us at the rate of one core.
constexpr std::size_t kCopiedBytes = 64 * 1024;

KVTiles make_tiles(std::size_t element_size, std::size_t block_size, std::size_t padded_dim) {
  AMBIDEX_CHECK(element_size == 4 || element_size == 2 || element_size == 1, "element size: expected 4, 2 or 1 bytes, got ",
                element_size);
  AMBIDEX_CHECK(block_size >= 16 && block_size % 16 == 0, "block size: expected a multiple of 16 tokens, got ", block_size);
  AMBIDEX_CHECK(padded_dim >= 16 && padded_dim % 16 == 0 && padded_dim <= kLargestDim,
                "elements of a row: expected a multiple of 16 up to ", kLargestDim, ", got ", padded_dim);
  const std::size_t pack = 4 / element_size;
  std::size_t depth = 16 * pack;
  while (block_size % depth != 0) depth /= 2;
  return {element_size, block_size, padded_dim, pack, depth, block_size * padded_dim * element_size};
}

void store_rows(ThreadPool& pool, const TiledPart& to, char* records, const std::int64_t* slots, std::size_t num_rows,
                const char* rows) {
  const std::size_t record_bytes = to.tiles.record_bytes;
  const std::size_t row_bytes = to.head_dim * to.tiles.element_size;
  with_element(to.tiles.element_size, [&](auto zero) {
    using Element = decltype(zero);
    const auto store_token = [&](std::size_t t) {
      const auto slot = static_cast<std::size_t>(slots[t]);
      for (std::size_t head = 0; head < to.num_heads; ++head) {
        char* record = records + (head * to.num_blocks + slot / to.tiles.block_size) * record_bytes;
        const char* row = rows + (t * to.num_heads + head) * row_bytes;
        store_row(to, reinterpret_cast<Element*>(record), slot % to.tiles.block_size,
                  reinterpret_cast<const Element*>(row));
      }
    };
    // One decode step's few rows are not worth waking anyone.
    if (num_rows * to.num_heads * row_bytes < 64 * 1024) {
      for (std::size_t t = 0; t < num_rows; ++t) store_token(t);
    } else {
      parallel_for(pool, num_rows, store_token);
    }
  });
}

void store_values(Isa isa, Number number, const TiledPart& to, char* records, float* scales, const std::int64_t* slots,
                  std::size_t num_rows, std::size_t head_dim, const float* rows) {
  const std::size_t num_slots = to.num_blocks * to.tiles.block_size;
  alignas(64) char narrowed[kLargestDim * sizeof(float)];
  with_element(to.tiles.element_size, [&](auto zero) {
    using Element = decltype(zero);
    for (std::size_t t = 0; t < num_rows; ++t) {
      if (slots[t] < 0) continue;
      const auto slot = static_cast<std::size_t>(slots[t]);
      AMBIDEX_CHECK(slot < num_slots, "slots: expected up to ", num_slots, " (not included), got ", slot);
      for (std::size_t head = 0; head < to.num_heads; ++head) {
        const float* row = rows + (t * to.num_heads + head) * head_dim;
        if (number == Number::kInt4) {
          const std::size_t block_size = to.tiles.block_size, num_words = words_of(2 * to.tiles.padded_dim);
          float* words = scales + ((head * to.num_blocks + slot / block_size) * num_words) * block_size + slot % block_size;
          pack_row(isa, row, head_dim, 2 * to.tiles.padded_dim, reinterpret_cast<std::uint8_t*>(narrowed), words, block_size);
        } else if (number == Number::kInt8) {
          scales[head * num_slots + slot] =
              quantize_row(isa, row, to.head_dim, reinterpret_cast<std::int8_t*>(narrowed));
        } else {
          narrow(isa, row, to.head_dim, number, narrowed);
        }
        char* record = records + (head * to.num_blocks + slot / to.tiles.block_size) * to.tiles.record_bytes;
        store_row(to, reinterpret_cast<Element*>(record), slot % to.tiles.block_size,
                  reinterpret_cast<const Element*>(narrowed));
      }
    }
  });
}

void pack_blocks(ThreadPool& pool, const TiledPart& to, char* records, const std::int64_t* block_ids,
                 std::size_t num_blocks, const char* rows) {
  const std::size_t block_size = to.tiles.block_size;
  const std::size_t record_bytes = to.tiles.record_bytes;
  const std::size_t row_bytes = to.head_dim * to.tiles.element_size;
  with_element(to.tiles.element_size, [&](auto zero) {
    using Element = decltype(zero);
    parallel_for(pool, to.num_heads * num_blocks, [&](std::size_t i) {
      const std::size_t head = i / num_blocks;
      const auto block_id = static_cast<std::size_t>(block_ids[i % num_blocks]);
      auto* record = reinterpret_cast<Element*>(records + (head * to.num_blocks + block_id) * record_bytes);
      const char* row = rows + i * block_size * row_bytes;
      for (std::size_t token = 0; token < block_size; ++token, row += row_bytes) {
        store_row(to, record, token, reinterpret_cast<const Element*>(row));
      }
    });
  });
}

void copy_rows(ThreadPool& pool, const TiledPart& from, const char* records, const std::int64_t* block_ids,
                 const std::int64_t* places, std::size_t num_blocks, const RowTarget& to) {
  if (num_blocks == 0) return;
  const auto block_size = static_cast<std::int64_t>(from.tiles.block_size);
  const auto num_rows = static_cast<std::int64_t>(to.num_rows);
  const std::size_t record_bytes = from.tiles.record_bytes;
  const std::size_t row_bytes = from.head_dim * from.tiles.element_size;
  with_element(from.tiles.element_size, [&](auto zero) {
    using Element = decltype(zero);
    share_for(pool, from.num_heads * num_blocks, std::max<std::size_t>(1, kCopiedBytes / record_bytes), [&](std::size_t i) {
      const std::size_t head = i / num_blocks, block = i % num_blocks;
      const std::int64_t begin = std::max<std::int64_t>(0, -places[block]);
      const std::int64_t end = std::min(block_size, num_rows - places[block]);
      if (begin >= end) return;
      const char* record = records + (head * from.num_blocks + static_cast<std::size_t>(block_ids[block])) * record_bytes;
      char* rows = to.rows + head * to.head_bytes + static_cast<std::size_t>(places[block] + begin) * row_bytes;
      load_rows(from, reinterpret_cast<const Element*>(record), static_cast<std::size_t>(begin),
                static_cast<std::size_t>(end), reinterpret_cast<Element*>(rows));
    });
  });
}

}  // namespace ambidex
