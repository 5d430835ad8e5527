// What bounded attention does with the keys that it keeps, compiled once per instruction set (per_isa.cpp).
//
// They lie scattered: K and V of a key in one place, or with int8 its values in as many lines as it has 16 dims. So keys are
// listed first, and what will be read of a key is fetched into the second cache long before, into the first shortly before,
// while the keys before it are attended: some lines at a time, spread over their products, since a thread has few fetches
// on their way at once and waits when it asks for more.
#pragma once

#include "ops/bounded_queries-inl.h"
#include "simd/code_lanes.h"
#include "simd/token_lanes.h"

namespace ambidex::AMBIDEX_ISA {

constexpr std::size_t kKeptAtOnce = 16;  // keys; one vector of scores a row
constexpr std::size_t kMostListed = 1024;

struct KeepSpace {
  KeepSpace(char* base, const BoundedCall& call, std::size_t rows) {
    const std::size_t dim = call.scan.tiles.padded_dim;
    Carver carver(base);
    q_rows = carver.take<float>(rows * dim * sizeof(float));
    probs = carver.take<float>(rows * kKeptAtOnce * sizeof(float));
    listed = carver.take<Listed>(kMostListed * sizeof(Listed));
    bytes = carver.used();
  }

  struct Listed {
    std::size_t slot;   // in the pool
    std::size_t place;  // of the first row's score
  };

  float* q_rows;   // [rows, padded_dim]
  float* probs;    // [rows, kKeptAtOnce]; scores at first
  Listed* listed;  // [kMostListed]
  std::size_t bytes;
};

// Where a value lies: its first 16 dims; the next 16 come column_bytes later. In rows, behind the key.
template <class Element>
class Values {
 public:
  Values(const BoundedCall& call, std::size_t kv_head) {
    const std::size_t dim = call.v_tiles.padded_dim, slots = kv_head * call.scan.num_blocks * call.v_tiles.block_size;
    column_bytes_ = 16 * sizeof(Element);
    row_bytes_ = 2 * dim * sizeof(Element);
    first_ = call.rows + slots * row_bytes_ + row_bytes_ / 2;
  }

  const char* at(std::size_t slot) const { return first_ + slot * row_bytes_; }
  Lanes load(const char* value, std::size_t column, std::size_t) const {
    return load_some(reinterpret_cast<const Element*>(value + column * column_bytes_));
  }
  // Calls use(line) for each line of K (half 0) or of V (half 1).
  template <class Use>
  void for_half(std::size_t slot, std::size_t half, const Use& use) const {
    const char* part = at(slot) - (half == 0 ? row_bytes_ / 2 : 0);
    for (std::size_t i = 0; i < row_bytes_ / 2; i += 64) use(part + i);
  }

 private:
  std::size_t column_bytes_, row_bytes_;
  const char* first_;
};

// In tiles, four tokens to a line.
template <>
class Values<int8_t> {
 public:
  Values(const BoundedCall& call, std::size_t kv_head)
      : depth_(call.v_tiles.depth),
        group_bytes_(call.v_tiles.depth * call.v_tiles.padded_dim),
        column_bytes_(call.v_tiles.depth * 16),
        num_columns_(call.v_tiles.padded_dim / 16),
        first_(call.v + kv_head * call.scan.num_blocks * call.v_tiles.record_bytes) {}

  const char* at(std::size_t slot) const { return first_ + slot / depth_ * group_bytes_ + slot % depth_ / 4 * 64; }
  Lanes load(const char* value, std::size_t column, std::size_t slot) const {
    return load_token(reinterpret_cast<const int8_t*>(value + column * column_bytes_), slot % 4);
  }
  template <class Use>
  void for_half(std::size_t slot, std::size_t half, const Use& use) const {
    for (std::size_t i = half; i < num_columns_; i += 2) use(at(slot) + i * column_bytes_);
  }

 private:
  std::size_t depth_, group_bytes_, column_bytes_, num_columns_;
  const char* first_;
};

// out[row] += Σ probs[row] · value, 16 dims at a time, for kRows rows; calls between() before each.
template <class Element, std::size_t kRows, class Between>
inline void add_kept_rows(const Values<Element>& values, std::size_t num, const char* const* places,
                          const KeepSpace::Listed* keys, const float* probs, float* out, std::size_t dim,
                          const Between& between) {
  for (std::size_t column = 0; column < dim / 16; ++column) {
    between();
    Lanes sums[kRows];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) sums[r] = Lanes::load(out + r * dim + 16 * column);
    for (std::size_t i = 0; i < num; ++i) {
      const Lanes value = values.load(places[i], column, keys[i].slot);
#pragma GCC unroll 8
      for (std::size_t r = 0; r < kRows; ++r) {
        sums[r] = mul_add(Lanes::broadcast(probs[r * kKeptAtOnce + i]), value, sums[r]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) sums[r].store(out + r * dim + 16 * column);
  }
}

// scores[r * kKeptAtOnce] = q[r]·k · scale for kRows rows and one key.
template <class Element, std::size_t kRows>
inline void multiply_key(const Element* k, const float* q, std::size_t dim, float scale, float* scores) {
  Lanes sums[kRows];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kRows; ++r) sums[r] = Lanes::zero();
  for (std::size_t d = 0; d < dim; d += 16) {
    const Lanes part = load_some(k + d);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) sums[r] = mul_add(Lanes::load(q + r * dim + d), part, sums[r]);
  }
  if constexpr (kRows % 4 == 0) {
#pragma GCC unroll 2
    for (std::size_t r = 0; r < kRows; r += 4) {
      float four[4];
      sum_each({sums[r], sums[r + 1], sums[r + 2], sums[r + 3]}, four);
      for (std::size_t i = 0; i < 4; ++i) scores[(r + i) * kKeptAtOnce] = four[i] * scale;
    }
  } else {
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) scores[r * kKeptAtOnce] = sum_of(sums[r]) * scale;
  }
}

template <std::size_t kRows>
struct RowCount {
  static constexpr std::size_t value = kRows;
};

// Calls use(row, RowCount) for as many rows at once as sums fit into the registers, until all are done.
template <class Use>
inline void for_rows(std::size_t rows, const Use& use) {
  std::size_t row = 0;
#if defined(__AVX512F__)
  for (; row + 8 <= rows; row += 8) use(row, RowCount<8>{});
#endif
  for (; row + 4 <= rows; row += 4) use(row, RowCount<4>{});
  if (row + 2 <= rows) {
    use(row, RowCount<2>{});
    row += 2;
  }
  if (row < rows) use(row, RowCount<1>{});
}

template <class Element>
class Keeper {
 public:
  Keeper(const BoundedCall& call, const KeepRange& range, char* workspace)
      : call_(call),
        to_(range),
        rows_(range.keys.num_rows * call.scan.group_size),
        dim_(call.scan.tiles.padded_dim),
        ws_(workspace, call, rows_),
        keys_(call.scan, range.keys),
        values_(call, range.keys.kv_head) {
    const std::size_t slots = range.keys.kv_head * call.scan.num_blocks * call.scan.tiles.block_size;
    v_scales_ = call.v_scales == nullptr ? nullptr : call.v_scales + slots;
    k_rows_ = call.rows == nullptr ? nullptr : reinterpret_cast<const Element*>(call.rows) + slots * 2 * dim_;
  }

  void run() {
    widen_queries(call_.scan, to_.keys, rows_, ws_.q_rows);
    for (std::size_t row = 0; row < rows_; ++row) {
      to_.tops_kept[row] = -INFINITY;
      to_.sums[row] = to_.spared[row] = 0.0f;
    }
    memset(to_.outs, 0, rows_ * dim_ * sizeof(float));
    std::size_t num_kept = 0, num_listed = 0;
    const std::size_t end = to_.keys.first_key + to_.keys.num_keys;
    for (std::size_t key = to_.keys.first_key / kPieceTokens * kPieceTokens; key < end; key += kPieceTokens) {
      uint64_t wanted = find_wanted(key);
      num_kept += static_cast<std::size_t>(__builtin_popcountll(wanted));
      if (call_.kept_of_block != nullptr && wanted != 0) count(key, wanted);
      if (num_listed + kPieceTokens > kMostListed) {
        attend(num_listed);
        num_listed = 0;
      }
      for (; wanted != 0; wanted &= wanted - 1) {
        list(key, static_cast<std::size_t>(__builtin_ctzll(wanted)), ws_.listed[num_listed++]);
      }
    }
    attend(num_listed);
    *to_.num_kept = static_cast<float>(num_kept);
  }

 private:
  std::size_t place(std::size_t key) const { return (key - to_.base) * rows_; }

  // Bit i: some row keeps key + i.
  uint64_t find_wanted(std::size_t key) const {
    uint64_t bits = 0;
    for (std::size_t row = 0; row < rows_; ++row) {
      bits |= codes_from(to_.codes + place(key) + row * kPieceTokens, to_.thresholds[row]);
    }
    const std::size_t begin = to_.keys.first_key, end = begin + to_.keys.num_keys;
    if (key < begin) bits &= ~uint64_t{0} << (begin - key);
    if (key + kPieceTokens > end) bits &= ~uint64_t{0} >> (key + kPieceTokens - end);
    return bits;
  }

  // Blocks are whole units of 16 keys. Threads of other KV heads may count the same block at the same time.
  void count(std::size_t key, uint64_t wanted) const {
    for (std::size_t i = 0; i < kPieceTokens; i += 16) {
      const int num = __builtin_popcountll(wanted >> i & 0xffff);
      if (num == 0) continue;
      __atomic_fetch_add(call_.kept_of_block + keys_.slot(key + i) / call_.scan.tiles.block_size, num, __ATOMIC_RELAXED);
    }
  }

  void list(std::size_t key, std::size_t i, KeepSpace::Listed& to) const {
    to = {keys_.slot(key + i), place(key) + i};
    for (std::size_t row = 0; row < rows_; ++row) {
      const int code = to_.codes[to.place + row * kPieceTokens];
      if (code >= to_.thresholds[row]) continue;
      const int depth = to_.tops[row] - code;
      // The deepest were counted for more than they are; they are not worth a reckoning.
      if (depth < static_cast<int>(kNumCounts) - 1) to_.spared[row] += to_.weights[depth];
    }
  }

  // One half of a listed key's lines, into the second cache or the first; the scale of its value comes with the second.
  void fetch_half(std::size_t half, std::size_t far, std::size_t near, std::size_t num) const {
    if (far < num) fetch_half_of(ws_.listed[far], half, [](const char* p) { prefetch_to_l2(p); });
    if (near < num) fetch_half_of(ws_.listed[near], half, [](const char* p) { prefetch(p); });
  }
  template <class Fetch>
  void fetch_half_of(const KeepSpace::Listed& key, std::size_t half, const Fetch& fetch_line) const {
    values_.for_half(key.slot, half, fetch_line);
    if (half == 1 && v_scales_ != nullptr) fetch_line(reinterpret_cast<const char*>(v_scales_ + key.slot));
  }

  void attend(std::size_t num) {
    const std::size_t far = call_.tuning.keep_far_keys, near = call_.tuning.keep_near_keys, none = num;
    const bool is_spread = call_.tuning.is_keep_fetch_spread;
    for (std::size_t i = 0; i < far; ++i) {
      for (std::size_t half = 0; half < 2; ++half) fetch_half(half, i, none, num);
    }
    for (std::size_t i = 0; i < near; ++i) {
      for (std::size_t half = 0; half < 2; ++half) fetch_half(half, none, i, num);
    }
    for (std::size_t first = 0; first < num; first += kKeptAtOnce) {
      const std::size_t some = num - first < kKeptAtOnce ? num - first : kKeptAtOnce;
      const KeepSpace::Listed* keys = ws_.listed + first;
      const char* places[kKeptAtOnce];
      for (std::size_t i = 0; i < some; ++i) {
        fetch_half(0, first + far + i, first + near + i, num);
        if (!is_spread) fetch_half(1, first + far + i, first + near + i, num);
        places[i] = values_.at(keys[i].slot);
        score(keys[i], i);
      }
      for (std::size_t row = 0; row < rows_; ++row) soften(keys, some, row);
      std::size_t next = is_spread ? 0 : some;
      const std::size_t at_once = kKeptAtOnce * 16 / dim_ + 1;
      const auto fetch_some = [&] {
        for (std::size_t i = 0; i < at_once && next < some; ++i, ++next) {
          fetch_half(1, first + far + next, first + near + next, num);
        }
      };
      for_rows(rows_, [&](std::size_t row, auto count) {
        add_kept_rows<Element, decltype(count)::value>(values_, some, places, keys, ws_.probs + row * kKeptAtOnce,
                                                       to_.outs + row * dim_, dim_, fetch_some);
      });
    }
  }

  void score(const KeepSpace::Listed& key, std::size_t i) {
    if (k_rows_ == nullptr) {
      for (std::size_t row = 0; row < rows_; ++row) {
        ws_.probs[row * kKeptAtOnce + i] = to_.scores[key.place + row * kPieceTokens];
      }
      return;
    }
    if constexpr (sizeof(Element) > 1) {
      const float scale = call_.scan.scale * kLog2OfE;
      for_rows(rows_, [&](std::size_t row, auto count) {
        multiply_key<Element, decltype(count)::value>(k_rows_ + key.slot * 2 * dim_, ws_.q_rows + row * dim_, dim_, scale,
                                                      ws_.probs + row * kKeptAtOnce + i);
      });
    }
  }

  // Scores of a row become probs, its sum and out follow the new top.
  void soften(const KeepSpace::Listed* keys, std::size_t num, std::size_t row) {
    float* scores = ws_.probs + row * kKeptAtOnce;
    for (std::size_t i = num; i < kKeptAtOnce; ++i) scores[i] = -INFINITY;
    const float top = largest_of(Lanes::load(scores));
    float* out = to_.outs + row * dim_;
    if (top > to_.tops_kept[row]) {
      const float shrink = exp2f(to_.tops_kept[row] - top);
      to_.sums[row] *= shrink;
      to_.tops_kept[row] = top;
      for (std::size_t i = 0; i < dim_; i += 16) (Lanes::load(out + i) * Lanes::broadcast(shrink)).store(out + i);
    }
    const Lanes p = exp2_of(Lanes::load(scores) + Lanes::broadcast(-to_.tops_kept[row]));
    to_.sums[row] += sum_of(p);
    p.store(scores);
    if (v_scales_ == nullptr) return;
    for (std::size_t i = 0; i < num; ++i) scores[i] *= v_scales_[keys[i].slot];
  }

  const BoundedCall& call_;
  const KeepRange& to_;
  std::size_t rows_, dim_;
  KeepSpace ws_;
  Keys keys_;
  Values<Element> values_;
  const float* v_scales_;
  const Element* k_rows_;  // each with its value behind it
};

}  // namespace ambidex::AMBIDEX_ISA
