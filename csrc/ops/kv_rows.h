// Rows of K and V one by one, in records in tile order; and loops over them on the threads of a pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/pool.h"
#include "ops/kv_tiles.h"

namespace ambidex {

constexpr std::size_t kLargestDim = 1024;

// Where the elements of one token lie in a record: element `dim` at at(dim).
struct RowPlaces {
  RowPlaces(const TiledPart& part, std::size_t token) : pack(part.tiles.pack) {
    const std::size_t padded_dim = part.tiles.padded_dim;
    if (part.part == KVPart::kK) {
      base = token / 16 * 16 * padded_dim + token % 16 * pack;
      is_k = true;
    } else {
      depth = part.tiles.depth;
      base = token / depth * depth * padded_dim + token % depth / pack * 16 * pack + token % pack;
    }
  }
  std::size_t at(std::size_t dim) const {
    return is_k ? base + dim / pack * 16 * pack + dim % pack : base + dim / 16 * 16 * depth + dim % 16 * pack;
  }

  std::size_t pack;
  std::size_t base = 0;
  std::size_t depth = 0;
  bool is_k = false;
};

template <class Element>
void store_row(const TiledPart& to, Element* record, std::size_t token, const Element* row) {
  const RowPlaces places(to, token);
  for (std::size_t dim = 0; dim < to.head_dim; ++dim) record[places.at(dim)] = row[dim];
  for (std::size_t dim = to.head_dim; dim < to.tiles.padded_dim; ++dim) record[places.at(dim)] = Element{};
}

template <class Element>
void load_row(const TiledPart& from, const Element* record, std::size_t token, Element* row) {
  const RowPlaces places(from, token);
  for (std::size_t dim = 0; dim < from.head_dim; ++dim) row[dim] = record[places.at(dim)];
}

// Tokens begin … end - 1 of a record, row after row. Rows of whole lines of the record are taken lane by lane: many times
// as fast as number by number.
template <class Element>
void load_rows(const TiledPart& from, const Element* record, std::size_t begin, std::size_t end, Element* rows) {
  constexpr std::size_t kLanes = 16, kPack = 4 / sizeof(Element);
  const std::size_t padded_dim = from.tiles.padded_dim, depth = from.tiles.depth, head_dim = from.head_dim;
  const bool is_k = from.part == KVPart::kK;
  const std::size_t num_at_once = is_k ? kLanes : kPack;
  for (std::size_t token = begin; token < end;) {
    Element* row = rows + (token - begin) * head_dim;
    if (token % num_at_once != 0 || end - token < num_at_once) {
      load_row(from, record, token++, row);
      continue;
    }
    std::size_t num_dims;
    if (is_k) {  // [lines][16 tokens][pack dims]
      const Element* lines = record + token * padded_dim;
      num_dims = head_dim / kPack * kPack;
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        for (std::size_t dim = 0; dim < num_dims; dim += kPack) {
          std::memcpy(row + lane * head_dim + dim, lines + (dim * kLanes) + lane * kPack, 4);
        }
      }
    } else {  // [columns][depth / pack lines][16 dims][pack tokens]
      const Element* lines = record + token / depth * depth * padded_dim + token % depth / kPack * kLanes * kPack;
      num_dims = head_dim / kLanes * kLanes;
      for (std::size_t dim = 0; dim < num_dims; dim += kLanes, lines += kLanes * depth) {
        std::uint32_t words[kLanes];  // x86-64: the first token's number is the lowest
        std::memcpy(words, lines, sizeof words);
        for (std::size_t i = 0; i < kPack; ++i) {
          Element* to = row + i * head_dim + dim;
          for (std::size_t lane = 0; lane < kLanes; ++lane) {
            to[lane] = static_cast<Element>(words[lane] >> (i * 8 * sizeof(Element)));
          }
        }
      }
    }
    for (std::size_t i = 0; num_dims < head_dim && i < num_at_once; ++i) {
      const RowPlaces places(from, token + i);
      for (std::size_t dim = num_dims; dim < head_dim; ++dim) row[i * head_dim + dim] = record[places.at(dim)];
    }
    token += num_at_once;
  }
}

// Calls body(i) for i in 0 … num_items - 1, spread over the threads in runs of equal length.
template <class Body>
void parallel_for(ThreadPool& pool, std::size_t num_items, const Body& body) {
  struct Context {
    const Body& body;
    std::size_t num_items, num_threads;
  } context{body, num_items, std::min(pool.num_threads(), num_items)};
  const auto work = [](void* pointer, std::size_t thread) {
    const auto& c = *static_cast<Context*>(pointer);
    if (thread >= c.num_threads) return;
    const std::size_t end = c.num_items * (thread + 1) / c.num_threads;
    for (std::size_t i = c.num_items * thread / c.num_threads; i < end; ++i) c.body(i);
  };
  if (context.num_threads <= 1) {
    for (std::size_t i = 0; i < num_items; ++i) body(i);
  } else {
    pool.run(work, &context);
  }
}

// The same for items that the threads share out among themselves, so many at a time: a thread whose processor is busy with
// other work keeps the caller waiting for no more than those.
template <class Body>
void share_for(ThreadPool& pool, std::size_t num_items, std::size_t num_at_once, const Body& body) {
  struct Context {
    const Body& body;
    std::size_t num_items, num_at_once;
    std::atomic<std::size_t> next{0};
  } context{body, num_items, num_at_once};
  const auto work = [](void* pointer, std::size_t) {
    auto& c = *static_cast<Context*>(pointer);
    while (true) {
      const std::size_t begin = c.next.fetch_add(c.num_at_once, std::memory_order_relaxed);
      if (begin >= c.num_items) return;
      for (std::size_t i = begin; i < std::min(begin + c.num_at_once, c.num_items); ++i) c.body(i);
    }
  };
  if (num_items <= num_at_once) {
    work(&context, 0);
  } else {
    pool.run_shared(work, &context);
  }
}

// Calls body(Element{}) with an unsigned integer of the element's size.
template <class Body>
void with_element(std::size_t element_size, const Body& body) {
  if (element_size == 4) return body(std::uint32_t{});
  if (element_size == 2) return body(std::uint16_t{});
  return body(std::uint8_t{});
}

}  // namespace ambidex
