// Rows of K and V one by one, in records in tile order; and loops over them on the threads of a pool.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

// Calls body(Element{}) with an unsigned integer of the element's size.
template <class Body>
void with_element(std::size_t element_size, const Body& body) {
  if (element_size == 4) return body(std::uint32_t{});
  if (element_size == 2) return body(std::uint16_t{});
  return body(std::uint8_t{});
}

}  // namespace ambidex
