// Bodies of bounded attention, compiled once per instruction set (per_isa.cpp).
//
// Scores are 8-bit products, in units of log2: with the query rounded to 16-bit integers, q ≈ f · n, and a key's scanned
// row s · m (8-bit integers m), of which K itself may differ by s / 2 in each number,
//
//   |q·k - f·s n·m| <= ‖q‖₁ · s / 2 + ‖q - f·n‖ · ‖s·m‖        ‖q - f·n‖ <= f / 2 · √D
//
// The first term is 0 where the scanned keys are K. Upper score: product + slope · s + shift.
#pragma once

#include <math.h>

#include "ops/attention-inl.h"
#include "ops/bounded.h"
#include "simd/token_lanes.h"

namespace ambidex::AMBIDEX_ISA {

constexpr std::size_t kKeptAtOnce = 32;  // keys; with 128 dims of 16-bit V and K rows 24 KiB: what a first cache holds
// What fp32 may take from a score: a product of 32-bit integers, three factors and two sums round by 2^-24 of at most
// 127 · s · ‖q‖₁ each.
constexpr float kScoreRounding = 1e-4f;
constexpr float kHalfAndRounding = 0.5006f;
constexpr float kQueryRounding = 0.502f;

template <class Form>
struct BoundedSpace {
  BoundedSpace(char* base, const BoundedCall& call, std::size_t rows) {
    const std::size_t dim = call.scan.tiles.padded_dim;
    const std::size_t whole = (rows + 15) / 16 * 16;  // AMX stores whole tiles
    Carver carver(base);
    q = carver.take<typename Form::Operand>(Form::operand_bytes(rows, dim));
    q_factors = carver.take<float>(whole * sizeof(float));
    q_rows = carver.take<float>(rows * dim * sizeof(float));
    slopes = carver.take<float>(rows * sizeof(float));
    shifts = carver.take<float>(rows * sizeof(float));
    scores = carver.take<float>(whole * kPieceTokens * sizeof(float));
    sums = carver.take<float>(rows * 32 * sizeof(float));
    probs = carver.take<float>(rows * kKeptAtOnce * sizeof(float));
    bytes = carver.used();
  }

  typename Form::Operand* q;  // [rows, padded_dim]
  float* q_factors;           // [rows]
  float* q_rows;              // [rows, padded_dim]
  float *slopes, *shifts;     // [rows]
  float* scores;              // [rows, kPieceTokens]
  float* sums;                // [rows, 2, 16]: of upper and of lower scores, in lanes
  float* probs;               // [rows, kKeptAtOnce]
  std::size_t bytes;
};

// The longest row of K and of V in the blocks of a range.
struct Norms {
  float k, v;
};

inline Norms longest(const BoundedCall& call, const AttendRange& range) {
  const float* norms = call.norms + range.kv_head * call.scan.num_blocks * 2;
  const std::size_t block_size = call.scan.tiles.block_size;
  Norms found{0.0f, 0.0f};
  for (std::size_t i = range.first_key / block_size; i <= (range.first_key + range.num_keys - 1) / block_size; ++i) {
    const float* of_block = norms + 2 * range.block_ids[i];
    found.k = of_block[0] > found.k || of_block[0] != of_block[0] ? of_block[0] : found.k;
    found.v = of_block[1] > found.v || of_block[1] != of_block[1] ? of_block[1] : found.v;
  }
  return found;
}

// Queries as fp32 rows, and what their products may be off by.
template <class Form>
inline void read_queries(const BoundedCall& bounded, const AttendRange& range, std::size_t rows, float k_norm,
                         const BoundedSpace<Form>& ws) {
  const AttendCall& call = bounded.scan;
  const std::size_t dim = call.tiles.padded_dim, num_q_heads = call.num_kv_heads * call.group_size;
  const float scale = call.scale * kLog2OfE;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t token = range.first_row + row / call.group_size;
    const std::size_t head = range.kv_head * call.group_size + row % call.group_size;
    const std::size_t from = (token * num_q_heads + head) * call.head_dim;
    float* q = ws.q_rows + row * dim;
    float sum = 0.0f;
    for (std::size_t i = 0; i < call.head_dim; ++i) {
      q[i] = q_element(call, from + i);
      sum += fabsf(q[i]);
    }
    for (std::size_t i = call.head_dim; i < dim; ++i) q[i] = 0.0f;
    const float factor = largest_magnitude(q, dim) / kLargestOperand;
    ws.q_factors[row] = factor;
    ws.slopes[row] = scale * sum * (bounded.rows != nullptr ? kHalfAndRounding : kScoreRounding);
    ws.shifts[row] = scale * factor * kQueryRounding * sqrtf(static_cast<float>(dim)) * k_norm;
  }
}

template <class Form>
inline void pack_queries(std::size_t rows, std::size_t dim, const BoundedSpace<Form>& ws) {
  for (std::size_t row = 0; row < rows; ++row) {
    const float factor = ws.q_factors[row];
    const Lanes to_integer = Lanes::broadcast(factor == 0.0f ? 0.0f : 1.0f / factor);
    for (std::size_t i = 0; i < dim; i += 16) {
      Form::write(ws.q, dim, row, rows, i, Lanes::load(ws.q_rows + row * dim + i) * to_integer);
    }
  }
}

inline bool is_visible(const AttendRange& range, std::size_t key) {
  return key >= range.first_key && key < range.first_key + range.num_keys;
}

// Scales of 64 keys, 0 where a key is not visible; returns the largest.
inline float load_some_scales(const float* scales, const Keys& keys, const AttendRange& range, std::size_t first_key,
                              std::size_t num_units, float* to) {
  for (std::size_t i = 0; i < kPieceUnits; ++i) {
    if (i < num_units) {
      memcpy(to + 16 * i, scales + keys.slot(first_key + 16 * i), 16 * sizeof(float));
    } else {
      memset(to + 16 * i, 0, 16 * sizeof(float));
    }
  }
  if (!is_visible(range, first_key) || !is_visible(range, first_key + kPieceTokens - 1)) {
    for (std::size_t i = 0; i < kPieceTokens; ++i) to[i] = is_visible(range, first_key + i) ? to[i] : 0.0f;
  }
  return largest_magnitude(to, kPieceTokens);
}

// At most 2^-x, for x >= 0, and little less where x is small: (1 - x ln 2 / 16)^16.
inline float low_power(float x) {
  float t = 1.0f - x * (kLogOf2 / 16.0f);
  t = t > 0.0f ? t : t != t ? t : 0.0f;
  t *= t;
  t *= t;
  t *= t;
  return t * t;
}

// Upper scores of a row over 64 keys, and what they add to its sums, which are kept in 16 lanes each.
template <class Form>
inline void raise_row(const AttendRange& range, std::size_t key, bool is_edge, std::size_t row, float scale,
                      const float* k_scales, float largest_scale, const BoundedSpace<Form>& ws, const ScanRange& to) {
  float* upper = to.upper + row * to.stride + (key - to.base);
  const float* scores = ws.scores + row * kPieceTokens;
  const Lanes factor = Lanes::broadcast(scale), slope = Lanes::broadcast(ws.slopes[row]);
  const Lanes shift = Lanes::broadcast(ws.shifts[row]);
  Lanes raised[kPieceUnits];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kPieceUnits; ++i) {
    raised[i] = mul_add(mul_add(Lanes::load(scores + 16 * i), factor, slope), Lanes::load(k_scales + 16 * i), shift);
    raised[i].store(upper + 16 * i);
  }
  if (is_edge) {
    for (std::size_t i = 0; i < kPieceTokens; ++i) upper[i] = is_visible(range, key + i) ? upper[i] : -INFINITY;
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPieceUnits; ++i) raised[i] = Lanes::load(upper + 16 * i);
  }
  const Lanes most = larger(larger(raised[0], raised[1]), larger(raised[2], raised[3]));
  float* sums = ws.sums + row * 32;
  Lanes uppers = Lanes::load(sums), lowers = Lanes::load(sums + 16);
  if (not_less(most, to.tops[row]) != 0) {
    const float top = largest_of(most);
    if (top > to.tops[row]) {
      const Lanes shrink = Lanes::broadcast(exp2f(to.tops[row] - top));
      to.tops[row] = top;
      uppers = uppers * shrink;
      lowers = lowers * shrink;
    }
  }
  const Lanes minus_top = Lanes::broadcast(-to.tops[row]);
  Lanes sum = Lanes::zero();
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kPieceUnits; ++i) sum = sum + exp2_of(raised[i] + minus_top);
  const float low = low_power(2.0f * (ws.slopes[row] * largest_scale + ws.shifts[row]));
  (uppers + sum).store(sums);
  mul_add(sum, Lanes::broadcast(low), lowers).store(sums + 16);
}

template <class Form>
void scan_as(const BoundedCall& bounded, const ScanRange& to, char* workspace) {
  const AttendCall& call = bounded.scan;
  const AttendRange& range = to.keys;
  const std::size_t rows = range.num_rows * call.group_size, dim = call.tiles.padded_dim;
  const BoundedSpace<Form> ws(workspace, bounded, rows);
  const Keys keys(call, range);
  const Norms norms = longest(bounded, range);
  const float scale = call.scale * kLog2OfE;
  const float* scales = call.k_scales + range.kv_head * call.num_blocks * call.tiles.block_size;
  typename Form::State state;
  alignas(64) float k_scales[kPieceTokens];
  read_queries<Form>(bounded, range, rows, norms.k, ws);
  pack_queries<Form>(rows, dim, ws);
  *to.value_norm = norms.v;
  for (std::size_t row = 0; row < rows; ++row) {
    to.tops[row] = -INFINITY;
    to.shifts[row] = ws.shifts[row];
  }
  memset(ws.sums, 0, rows * 32 * sizeof(float));
  const std::size_t end = (range.first_key + range.num_keys + 15) / 16 * 16;
  const std::size_t units_ahead = (kFarBytes + keys.unit_bytes() - 1) / keys.unit_bytes();
  for (std::size_t key = range.first_key / kPieceTokens * kPieceTokens; key < end; key += kPieceTokens) {
    const std::size_t left = (end - key) / 16, num_units = left < kPieceUnits ? left : kPieceUnits;
    const char *units[kPieceUnits] = {}, *far[kPieceUnits] = {}, *near[kPieceUnits] = {};
    for (std::size_t i = 0; i < num_units && i < kPieceUnits; ++i) {
      const std::size_t next = key + 16 * (i + units_ahead);
      units[i] = keys.k_unit(key + 16 * i);
      far[i] = next < end ? keys.k_unit(next) : units[i];
      near[i] = units[i] + kNearBytes;  // K of a block is contiguous
    }
    const Columns columns{units, far, near, num_units, keys.unit_bytes() / 64};
    Form::multiply(state, rows, ws.q, dim, columns, {ws.scores, kPieceTokens, false, ws.q_factors});
    const float largest_scale = load_some_scales(scales, keys, range, key, num_units, k_scales);
    const bool is_edge = !is_visible(range, key) || !is_visible(range, key + kPieceTokens - 1);
    for (std::size_t row = 0; row < rows; ++row) {
      raise_row<Form>(range, key, is_edge, row, scale, k_scales, largest_scale, ws, to);
    }
  }
  for (std::size_t row = 0; row < rows; ++row) {
    to.uppers[row] = sum_of(Lanes::load(ws.sums + row * 32));
    to.lowers[row] = sum_of(Lanes::load(ws.sums + row * 32 + 16));
  }
}

// Keys that are kept: their places in the pool, and scores of each row.
struct Kept {
  std::size_t num = 0;
  std::size_t keys[kKeptAtOnce], slots[kKeptAtOnce];
};

// Where a value lies: the line of its first 16 dims; those of the next 16 come column_bytes later.
template <class Element>
class Values {
 public:
  Values(const BoundedCall& call, std::size_t kv_head)
      : depth_(call.v_tiles.depth),
        group_bytes_(call.v_tiles.depth * call.v_tiles.padded_dim * sizeof(Element)),
        column_bytes_(call.v_tiles.depth * 16 * sizeof(Element)),
        num_columns_(call.v_tiles.padded_dim / 16),
        first_(call.v + kv_head * call.scan.num_blocks * call.v_tiles.record_bytes) {}

  const char* line(std::size_t slot) const {
    return first_ + slot / depth_ * group_bytes_ + slot % depth_ / kPack * 64;
  }
  void fetch(std::size_t slot) const {
    const char* at = line(slot);
    for (std::size_t i = 0; i < num_columns_; ++i) prefetch(at + i * column_bytes_);
  }
  std::size_t num_columns() const { return num_columns_; }
  std::size_t column_bytes() const { return column_bytes_; }
  static constexpr std::size_t kPack = 4 / sizeof(Element);

 private:
  std::size_t depth_, group_bytes_, column_bytes_, num_columns_;
  const char* first_;
};

// out[row] += Σ probs[row] · value, 16 dims at a time, for kRows rows.
template <class Element, std::size_t kRows>
inline void add_kept_rows(const Kept& kept, const Values<Element>& values, const char* const* lines, const float* probs,
                          float* out, std::size_t dim) {
  for (std::size_t column = 0; column < values.num_columns(); ++column) {
    Lanes sums[kRows];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) sums[r] = Lanes::load(out + r * dim + 16 * column);
    for (std::size_t i = 0; i < kept.num; ++i) {
      const auto* line = reinterpret_cast<const Element*>(lines[i] + column * values.column_bytes());
      const Lanes value = load_token(line, kept.slots[i] % Values<Element>::kPack);
#pragma GCC unroll 8
      for (std::size_t r = 0; r < kRows; ++r) {
        sums[r] = mul_add(Lanes::broadcast(probs[r * kKeptAtOnce + i]), value, sums[r]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) sums[r].store(out + r * dim + 16 * column);
  }
}

// scores[r][i] = q[r]·k for kRows rows and one key.
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
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kRows; ++r) scores[r * kKeptAtOnce] = sum_of(sums[r]) * scale;
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

template <class Form, class Element>
class Keeper {
 public:
  Keeper(const BoundedCall& call, const KeepRange& range, char* workspace)
      : call_(call),
        to_(range),
        rows_(range.keys.num_rows * call.scan.group_size),
        dim_(call.scan.tiles.padded_dim),
        ws_(workspace, call, rows_),
        keys_(call.scan, range.keys),
        values_(call, range.keys.kv_head),
        k_scales_(call.scan.k_scales + range.keys.kv_head * call.scan.num_blocks * call.scan.tiles.block_size),
        v_scales_(call.v_scales == nullptr
                      ? nullptr
                      : call.v_scales + range.keys.kv_head * call.scan.num_blocks * call.scan.tiles.block_size),
        k_rows_(reinterpret_cast<const Element*>(call.rows) +
                (call.rows == nullptr
                     ? 0
                     : range.keys.kv_head * call.scan.num_blocks * call.scan.tiles.block_size * dim_)) {}

  void run() {
    read_queries<Form>(call_, to_.keys, rows_, longest(call_, to_.keys).k, ws_);
    for (std::size_t row = 0; row < rows_; ++row) {
      to_.tops[row] = -INFINITY;
      to_.sums[row] = to_.kept[row] = 0.0f;
    }
    memset(to_.outs, 0, rows_ * dim_ * sizeof(float));
    std::size_t num_kept = 0;
    const std::size_t end = to_.keys.first_key + to_.keys.num_keys;
    for (std::size_t key = to_.keys.first_key / 16 * 16; key < end; key += 16) {
      uint32_t bits = wanted(key);
      while (bits != 0) {
        const std::size_t i = static_cast<std::size_t>(__builtin_ctz(bits));
        bits &= bits - 1;
        add(key + i);
        ++num_kept;
      }
    }
    attend(kept_[1 - filling_]);
    attend(kept_[filling_]);
    *to_.num_kept = static_cast<float>(num_kept);
  }

 private:
  uint32_t wanted(std::size_t key) const {
    uint32_t bits = 0, before = 0;
    for (std::size_t row = 0; row < rows_; ++row) {
      const Lanes upper = Lanes::load(to_.upper + row * to_.stride + (key - to_.base));
      bits |= not_less(upper, to_.thresholds[row]);
      if (to_.before != nullptr) before |= not_less(upper, to_.before[row]);
    }
    bits &= ~before;
    if (!is_visible(to_.keys, key) || !is_visible(to_.keys, key + 15)) {
      for (std::size_t i = 0; i < 16; ++i) bits &= is_visible(to_.keys, key + i) ? ~0u : ~(1u << i);
    }
    return bits;
  }

  // Takes a key in and fetches what will be read of it; a full set is attended one set later.
  void add(std::size_t key) {
    Kept& kept = kept_[filling_];
    const std::size_t slot = keys_.slot(key);
    kept.keys[kept.num] = key;
    kept.slots[kept.num] = slot;
    ++kept.num;
    values_.fetch(slot);
    if (v_scales_ != nullptr) prefetch(reinterpret_cast<const char*>(v_scales_ + slot));
    if (call_.rows != nullptr) {
      const char* row = reinterpret_cast<const char*>(k_rows_ + slot * dim_);
      for (std::size_t i = 0; i < dim_ * sizeof(Element); i += 64) prefetch(row + i);
    }
    if (kept.num < kKeptAtOnce) return;
    filling_ = 1 - filling_;
    attend(kept_[filling_]);
  }

  void attend(Kept& kept) {
    if (kept.num == 0) return;
    score(kept);
    const char* lines[kKeptAtOnce];
    for (std::size_t i = 0; i < kept.num; ++i) lines[i] = values_.line(kept.slots[i]);
    for (std::size_t row = 0; row < rows_; ++row) soften(kept, row);
    for_rows(rows_, [&](std::size_t row, auto num) {
      add_kept_rows<Element, decltype(num)::value>(kept, values_, lines, ws_.probs + row * kKeptAtOnce,
                                                   to_.outs + row * dim_, dim_);
    });
    kept.num = 0;
  }

  // Scores of kept keys into probs, and the sums of their upper ones.
  void score(const Kept& kept) {
    const float scale = call_.scan.scale * kLog2OfE;
    for (std::size_t row = 0; row < rows_; ++row) {
      float* scores = ws_.probs + row * kKeptAtOnce;
      const float* upper = to_.upper + row * to_.stride;
      for (std::size_t i = 0; i < kKeptAtOnce; ++i) {
        scores[i] = i < kept.num ? upper[kept.keys[i] - to_.base] : -INFINITY;
      }
      const Lanes minus_anchor = Lanes::broadcast(-to_.anchors[row]);
      Lanes sum = Lanes::zero();
      for (std::size_t i = 0; i < kKeptAtOnce; i += 16) sum = sum + exp2_of(Lanes::load(scores + i) + minus_anchor);
      to_.kept[row] += sum_of(sum);
      if (call_.rows != nullptr) continue;
      for (std::size_t i = 0; i < kept.num; ++i) {
        scores[i] -= ws_.slopes[row] * k_scales_[kept.slots[i]] + ws_.shifts[row];
      }
    }
    if (call_.rows == nullptr) return;
    if constexpr (sizeof(Element) > 1) {
      for (std::size_t i = 0; i < kept.num; ++i) {
        for_rows(rows_, [&](std::size_t row, auto num) {
          multiply_key<Element, decltype(num)::value>(k_rows_ + kept.slots[i] * dim_, ws_.q_rows + row * dim_, dim_,
                                                      scale, ws_.probs + row * kKeptAtOnce + i);
        });
      }
    }
  }

  void soften(const Kept& kept, std::size_t row) {
    float* scores = ws_.probs + row * kKeptAtOnce;
    Lanes most = Lanes::broadcast(-INFINITY);
    for (std::size_t i = 0; i < kKeptAtOnce; i += 16) most = larger(most, Lanes::load(scores + i));
    const float top = largest_of(most);
    float* out = to_.outs + row * dim_;
    if (top > to_.tops[row]) {
      const Lanes shrink = Lanes::broadcast(exp2f(to_.tops[row] - top));
      to_.sums[row] *= exp2f(to_.tops[row] - top);
      to_.tops[row] = top;
      for (std::size_t i = 0; i < dim_; i += 16) (Lanes::load(out + i) * shrink).store(out + i);
    }
    const Lanes minus_top = Lanes::broadcast(-to_.tops[row]);
    Lanes sum = Lanes::zero();
    for (std::size_t i = 0; i < kKeptAtOnce; i += 16) {
      const Lanes p = exp2_of(Lanes::load(scores + i) + minus_top);
      sum = sum + p;
      p.store(scores + i);
    }
    to_.sums[row] += sum_of(sum);
    if (v_scales_ == nullptr) return;
    for (std::size_t i = 0; i < kept.num; ++i) scores[i] *= v_scales_[kept.slots[i]];
  }

  const BoundedCall& call_;
  const KeepRange& to_;
  std::size_t rows_, dim_;
  BoundedSpace<Form> ws_;
  Keys keys_;
  Values<Element> values_;
  const float *k_scales_, *v_scales_;
  const Element* k_rows_;
  Kept kept_[2];
  std::size_t filling_ = 0;
};

void scan_range(const BoundedCall& call, const ScanRange& range, char* workspace) {
  with_form(Number::kInt8, range.keys.num_rows * call.scan.group_size, [&](auto form) {
    if constexpr (decltype(form)::kHasScales) scan_as<decltype(form)>(call, range, workspace);
  });
}

void keep_range(const BoundedCall& call, const KeepRange& range, char* workspace) {
  switch (call.v_number) {
    case Number::kFp32:
      return Keeper<Int8Dot, float>(call, range, workspace).run();
    case Number::kBf16:
      return Keeper<Int8Dot, Bf16>(call, range, workspace).run();
    case Number::kFp16:
      return Keeper<Int8Dot, Fp16>(call, range, workspace).run();
    default:
      return Keeper<Int8Dot, int8_t>(call, range, workspace).run();
  }
}

std::size_t bounded_workspace_bytes(const BoundedCall& call, std::size_t rows) {
  std::size_t bytes = BoundedSpace<Int8Dot>(nullptr, call, rows).bytes;
  with_form(Number::kInt8, rows, [&](auto form) {
    if constexpr (decltype(form)::kHasScales) {
      const std::size_t other = BoundedSpace<decltype(form)>(nullptr, call, rows).bytes;
      bytes = other > bytes ? other : bytes;
    }
  });
  return bytes;
}

}  // namespace ambidex::AMBIDEX_ISA
