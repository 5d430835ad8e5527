// Body of attend_range, compiled once per instruction set (per_isa.cpp).
//
// For a piece of kPieceTokens keys at a time, all rows (query heads of the group times queries of the request) do
//
//   score = scale * q·k        top' = max(top, score)        p = exp(score - top')
//   sum   = sum * exp(top - top') + Σ p                      out = out * exp(top - top') + Σ p v
//
// and in the end out / sum and lse = top + log(sum). Source: online softmax, arXiv:1805.02867. Exponents are of base 2:
// `top` is kept in units of log2.
//
// Keys are read in the order K of piece 0, V of piece 0, K of piece 1, …, in units of 16 tokens of K or V, which are
// contiguous; what comes kFarBytes and kNearBytes later in that order is fetched while a line is used. Packed units
// (ops/kv_int4.h) become int8 in the workspace first, a piece at a time, which then is attended as if it had lain so.
#pragma once

#include <math.h>

#include "ops/attention.h"
#include "ops/kv_int4-inl.h"
#include "ops/products-inl.h"

namespace ambidex::AMBIDEX_ISA {

constexpr std::size_t kPieceTokens = 64;
constexpr std::size_t kPieceUnits = kPieceTokens / 16;
// Every line is fetched by software, into the second cache early and into the first shortly before. Measured on Xeon with
// AMX, bf16, 4 heads, 8 threads: 78 GB/s; 67 with the first cache alone, 4 KiB ahead; 62 with the processor's own
// prefetcher. 15 threads: 120, 110, 87. Distances of 8 to 24 KiB and 1 to 4 KiB differ by less than the runs.
constexpr std::size_t kFarBytes = 16384;
constexpr std::size_t kNearBytes = 1024;
constexpr std::size_t kMaxColumns = 64;  // 16 dims each: head_dim up to 1024
constexpr float kLog2OfE = 1.44269504088896341f;
constexpr float kLogOf2 = 0.693147180559945309f;

// Bytes handed out one after the other, each piece from a new line on; counts only while base is null.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}

  template <class T>
  T* take(std::size_t bytes) {
    char* here = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + 63) / 64 * 64;
    return reinterpret_cast<T*>(here);
  }
  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

template <class Form>
struct Workspace {
  Workspace(char* base, const AttendCall& call, std::size_t rows) {
    const std::size_t dim = call.tiles.padded_dim;
    const std::size_t whole = (rows + 15) / 16 * 16;  // AMX stores whole tiles
    Carver carver(base);
    q = carver.take<typename Form::Operand>(Form::operand_bytes(rows, dim));
    q_factors = carver.take<float>(whole * sizeof(float));
    q_row = carver.take<float>(dim * sizeof(float));
    scores = carver.take<float>(whole * kPieceTokens * sizeof(float));
    probs = carver.take<typename Form::Operand>(Form::operand_bytes(rows, kPieceTokens));
    prob_factors = carver.take<float>(whole * sizeof(float));
    out = carver.take<float>(whole * dim * sizeof(float));
    top = carver.take<float>(whole * sizeof(float));
    sum = carver.take<float>(whole * sizeof(float));
    first_group = carver.take<char>(call.tiles.depth * dim * call.tiles.element_size);
    last_group = carver.take<char>(call.tiles.depth * dim * call.tiles.element_size);
    k_whole = carver.take<char>(call.is_k_packed ? kPieceTokens * dim : 0);
    v_whole = carver.take<char>(call.is_v_packed ? kPieceTokens * dim : 0);
    bytes = carver.used();
  }

  typename Form::Operand* q;  // [rows, padded_dim]
  float* q_factors;           // [rows]
  float* q_row;               // [padded_dim]
  float* scores;              // [rows, kPieceTokens]
  typename Form::Operand* probs;
  float* prob_factors;  // [rows]
  float* out;           // [rows, padded_dim]
  float* top;           // [rows], in units of log2
  float* sum;           // [rows]
  char *first_group, *last_group;
  char *k_whole, *v_whole;  // [kPieceTokens / 16 units], of packed parts
  std::size_t bytes;
};

// The places of a range's keys in memory.
class Keys {
 public:
  Keys(const AttendCall& call, const AttendRange& range)
      : tiles_(call.tiles),
        block_ids_(range.block_ids),
        depth_(call.tiles.depth),
        unit_bytes_(16 * call.tiles.padded_dim * call.tiles.element_size),
        k_(call.k, call.k_scales, call.is_k_packed, call, range),
        v_(call.v, call.v_scales, call.is_v_packed, call, range) {}

  std::size_t depth() const { return depth_; }
  // Of 16 tokens as they are multiplied, and as they lie in memory.
  std::size_t unit_bytes() const { return unit_bytes_; }
  std::size_t k_unit_bytes() const { return k_.unit_bytes; }
  std::size_t v_unit_bytes() const { return v_.unit_bytes; }
  std::size_t group_bytes() const { return depth_ / 16 * unit_bytes_; }
  bool is_k_packed() const { return k_.is_packed; }
  bool is_v_packed() const { return v_.is_packed; }
  std::size_t slot(std::size_t key) const {
    return static_cast<std::size_t>(block_ids_[key / tiles_.block_size]) * tiles_.block_size + key % tiles_.block_size;
  }
  // Key is a multiple of 16 (K), of depth (V).
  const char* k_unit(std::size_t key) const { return unit(k_, key); }
  const char* v_unit(std::size_t key) const { return unit(v_, key); }
  // The scales of a key and of those behind it in its block.
  const float* k_scales(std::size_t key) const { return words(k_, key); }
  const float* v_scales(std::size_t key) const { return words(v_, key); }
  std::size_t block_size() const { return tiles_.block_size; }

 private:
  struct Part {
    Part(const char* records, const float* scales, bool packed, const AttendCall& call, const AttendRange& range)
        : is_packed(packed),
          unit_bytes(16 * call.tiles.padded_dim * call.tiles.element_size / (packed ? 2 : 1)),
          num_words(packed ? words_of(call.tiles.padded_dim) : 1) {
      const std::size_t block = range.kv_head * call.num_blocks;
      first = records + block * (call.tiles.record_bytes / (packed ? 2 : 1));
      first_words = scales == nullptr ? nullptr : scales + block * num_words * call.tiles.block_size;
    }

    bool is_packed;
    std::size_t unit_bytes;
    std::size_t num_words;  // beside a row
    const char* first;
    const float* first_words;
  };

  const char* unit(const Part& part, std::size_t key) const { return part.first + slot(key) / 16 * part.unit_bytes; }
  const float* words(const Part& part, std::size_t key) const {
    const auto block = static_cast<std::size_t>(block_ids_[key / tiles_.block_size]);
    return part.first_words + block * part.num_words * tiles_.block_size + key % tiles_.block_size;
  }

  KVTiles tiles_;
  const int64_t* block_ids_;
  std::size_t depth_, unit_bytes_;
  Part k_, v_;
};

// One piece: its units of K, then of V, then those that are read next, in the order of reading.
struct Piece {
  std::size_t first_key, num_units;
  const char* order[4 * kPieceUnits];
  std::size_t bytes[4 * kPieceUnits];

  void add(std::size_t i, const char* unit, std::size_t unit_bytes) {
    order[i] = unit;
    bytes[i] = unit_bytes;
  }
  // What lies at `offset` of a unit, or as far behind its end in the order of reading.
  const char* at(std::size_t unit, std::size_t offset) const {
    while (offset >= bytes[unit] && unit + 1 < 4 * kPieceUnits) {
      offset -= bytes[unit];
      ++unit;
    }
    return order[unit] + (offset < bytes[unit] ? offset : 0);
  }
};

inline Piece make_piece(const Keys& keys, std::size_t first_key, std::size_t end) {
  Piece piece;
  piece.first_key = first_key;
  const std::size_t left = (end - first_key) / 16;
  piece.num_units = left < kPieceUnits ? left : kPieceUnits;
  const std::size_t k_bytes = keys.k_unit_bytes(), v_bytes = keys.v_unit_bytes();
  std::size_t filled = 0;
  for (std::size_t i = 0; i < piece.num_units; ++i) piece.add(filled++, keys.k_unit(first_key + 16 * i), k_bytes);
  for (std::size_t i = 0; i < piece.num_units; ++i) piece.add(filled++, keys.v_unit(first_key + 16 * i), v_bytes);
  std::size_t next = first_key + 16 * piece.num_units;
  for (; next < end && filled < 3 * kPieceUnits; next += 16) piece.add(filled++, keys.k_unit(next), k_bytes);
  for (next = first_key + 16 * piece.num_units; next < end && filled < 4 * kPieceUnits; next += 16) {
    piece.add(filled++, keys.v_unit(next), v_bytes);
  }
  for (; filled < 4 * kPieceUnits; ++filled) piece.add(filled, piece.order[2 * piece.num_units - 1], v_bytes);
  return piece;
}

inline float q_element(const AttendCall& call, std::size_t i) {
  if (call.q_number == Number::kFp32) return static_cast<const float*>(call.q)[i];
  if (call.q_number == Number::kBf16) return to_float(static_cast<const Bf16*>(call.q)[i]);
  return to_float(static_cast<const Fp16*>(call.q)[i]);
}

inline float largest_magnitude(const float* x, std::size_t num) {
  Lanes largest = Lanes::zero();
  for (std::size_t i = 0; i < num; i += 16) largest = larger(largest, absolute(Lanes::load(x + i)));
  return largest_of(largest);
}

template <class Form>
inline void write_q(const AttendCall& call, const AttendRange& range, std::size_t rows, const Workspace<Form>& ws) {
  const std::size_t dim = call.tiles.padded_dim;
  const std::size_t num_q_heads = call.num_kv_heads * call.group_size;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t token = range.first_row + row / call.group_size;
    const std::size_t head = range.kv_head * call.group_size + row % call.group_size;
    const std::size_t from = (token * num_q_heads + head) * call.head_dim;
    for (std::size_t i = 0; i < call.head_dim; ++i) ws.q_row[i] = q_element(call, from + i);
    for (std::size_t i = call.head_dim; i < dim; ++i) ws.q_row[i] = 0.0f;
    float to_integer = 1.0f;
    if (Form::kHasScales) {
      const float largest = largest_magnitude(ws.q_row, dim);
      ws.q_factors[row] = largest / kLargestOperand;
      to_integer = largest == 0.0f ? 0.0f : kLargestOperand / largest;
    }
    for (std::size_t i = 0; i < dim; i += 16) {
      Form::write(ws.q, dim, row, rows, i, Lanes::load(ws.q_row + i) * Lanes::broadcast(to_integer));
    }
  }
}

template <class Form>
inline void score(typename Form::State& state, const Keys& keys, const Piece& piece, std::size_t rows, std::size_t dim,
                  const Workspace<Form>& ws) {
  const char *far[kPieceUnits], *near[kPieceUnits], *whole[kPieceUnits];
  for (std::size_t i = 0; i < piece.num_units && i < kPieceUnits; ++i) {
    far[i] = piece.at(i, kFarBytes);
    near[i] = piece.at(i, kNearBytes);
    if (!keys.is_k_packed()) continue;
    char* to = ws.k_whole + i * keys.unit_bytes();
    unpack_k_unit(piece.order[i], far[i], near[i], keys.k_scales(piece.first_key + 16 * i), keys.block_size(), dim, to);
    whole[i] = far[i] = near[i] = to;  // what is near is fetched again, which costs nothing
  }
  const Columns columns{keys.is_k_packed() ? whole : piece.order, far, near, piece.num_units, keys.unit_bytes() / 64};
  Form::multiply(state, rows, ws.q, dim, columns, {ws.scores, kPieceTokens, false, ws.q_factors});
}

// Scales of the keys of a piece, 0 where a key is not visible.
template <class ScalesOf>
inline void load_scales(const ScalesOf& scales_of, const AttendRange& range, const Piece& piece, float* to) {
  // NOTE: a piece has at most kPieceUnits units; GCC 13 warns of an overflow unless the loop says so itself.
  for (std::size_t i = 0; i < piece.num_units && i < kPieceUnits; ++i) {
    memcpy(to + 16 * i, scales_of(piece.first_key + 16 * i), 16 * sizeof(float));
  }
  const std::size_t end = range.first_key + range.num_keys;
  for (std::size_t i = 0; i < 16 * piece.num_units; ++i) {
    const std::size_t key = piece.first_key + i;
    if (key < range.first_key || key >= end) to[i] = 0.0f;
  }
}

// Keys outside of the range get -inf, whatever was computed for them.
inline void hide_keys(const AttendRange& range, const Piece& piece, float* scores) {
  const std::size_t end = range.first_key + range.num_keys;
  const std::size_t size = 16 * piece.num_units;
  for (std::size_t i = 0; i < size && piece.first_key + i < range.first_key; ++i) scores[i] = -INFINITY;
  for (std::size_t i = piece.first_key < end ? end - piece.first_key : 0; i < size; ++i) scores[i] = -INFINITY;
}

// Scores of a row fall with the distance of each key; the slope is divided by the scale that scores are still to get.
inline void tilt_row(const AttendCall& call, const AttendRange& range, const Piece& piece, std::size_t row,
                     float* scores) {
  alignas(64) static constexpr float kSteps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const std::size_t head = range.kv_head * call.group_size + row % call.group_size;
  const int64_t position = range.row_positions[range.first_row + row / call.group_size];
  const std::size_t block_size = call.tiles.block_size;
  const Lanes slope = Lanes::broadcast(call.slopes[head] / call.scale);
  for (std::size_t i = 0; i < piece.num_units && i < kPieceUnits; ++i) {
    const std::size_t key = piece.first_key + 16 * i;
    const int64_t first = range.block_positions[key / block_size] + static_cast<int64_t>(key % block_size);
    const Lanes distance = Lanes::load(kSteps) + Lanes::broadcast(static_cast<float>(first - position));  // not positive
    mul_add(slope, distance, Lanes::load(scores + 16 * i)).store(scores + 16 * i);
  }
}

// Scores of a row become probs, its sum and out follow the new top.
template <class Form>
inline void soften_row(const Piece& piece, std::size_t row, std::size_t rows, std::size_t dim, float scale,
                       const float* v_scales, const Workspace<Form>& ws) {
  float* scores = ws.scores + row * kPieceTokens;
  const std::size_t size = 16 * piece.num_units;
  Lanes largest = Lanes::load(scores);
  for (std::size_t i = 16; i < size; i += 16) largest = larger(largest, Lanes::load(scores + i));
  const float top = largest_of(largest) * scale;
  float* out = ws.out + row * dim;
  if (top > ws.top[row]) {
    const float shrink = exp2f(ws.top[row] - top);
    ws.top[row] = top;
    ws.sum[row] *= shrink;
    for (std::size_t i = 0; i < dim; i += 16) (Lanes::load(out + i) * Lanes::broadcast(shrink)).store(out + i);
  }
  const Lanes factor = Lanes::broadcast(scale);
  const Lanes minus_top = Lanes::broadcast(-ws.top[row]);
  Lanes sum = Lanes::zero();
  Lanes most = Lanes::zero();
  for (std::size_t i = 0; i < size; i += 16) {
    Lanes p = exp2_of(mul_add(Lanes::load(scores + i), factor, minus_top));
    sum = sum + p;
    if (Form::kHasScales) {
      p = p * Lanes::load(v_scales + i);
      most = larger(most, absolute(p));
      p.store(scores + i);
    } else {
      Form::write(ws.probs, kPieceTokens, row, rows, i, p);
    }
  }
  ws.sum[row] += sum_of(sum);
  if (Form::kHasScales) {
    const float largest_prob = largest_of(most);
    ws.prob_factors[row] = largest_prob / kLargestOperand;
    const Lanes to_integer = Lanes::broadcast(largest_prob == 0.0f ? 0.0f : kLargestOperand / largest_prob);
    for (std::size_t i = 0; i < size; i += 16) {
      Form::write(ws.probs, kPieceTokens, row, rows, i, Lanes::load(scores + i) * to_integer);
    }
  }
}

// A copy of a group of V with the rows of keys outside of the range set to 0: they may hold NaN, and 0 * NaN is NaN.
template <class Element>
inline const char* hide_rows(const char* group, std::size_t first_key, const AttendRange& range, std::size_t depth,
                             std::size_t dim, char* copy) {
  constexpr std::size_t kPack = 4 / sizeof(Element);
  const std::size_t end = range.first_key + range.num_keys;
  memcpy(copy, group, depth * dim * sizeof(Element));
  auto* elements = reinterpret_cast<Element*>(copy);
  for (std::size_t token = 0; token < depth; ++token) {
    if (first_key + token >= range.first_key && first_key + token < end) continue;
    for (std::size_t d = 0; d < dim; ++d) {
      elements[(d / 16 * (depth / kPack) + token / kPack) * 16 * kPack + d % 16 * kPack + token % kPack] = Element{};
    }
  }
  return copy;
}

// A group of packed V; what lies far and near behind each line in the order of reading is fetched.
inline void unpack_v_group(const Piece& piece, std::size_t unit, const float* words, std::size_t block_size,
                           std::size_t depth, std::size_t dim, char* to) {
  const std::size_t column_bytes = 16 * depth;
  for (std::size_t pair = 0; pair < dim / 32; ++pair) {
    const std::size_t offset = pair * column_bytes;
    unpack_v_columns(piece.order[unit] + offset, piece.at(unit, offset + kFarBytes), piece.at(unit, offset + kNearBytes),
                     words + (1 + pair) * block_size, depth, to + 2 * offset);
  }
}

template <class Form>
inline void add_values(typename Form::State& state, const Keys& keys, const AttendRange& range, const Piece& piece,
                       std::size_t rows, std::size_t dim, const Workspace<Form>& ws) {
  const std::size_t depth = keys.depth();
  const std::size_t num_columns = dim / 16;
  const std::size_t column_bytes = keys.group_bytes() / num_columns;
  const std::size_t end = range.first_key + range.num_keys;
  const char* lines[kMaxColumns];
  const char *far[kMaxColumns], *near[kMaxColumns];
  for (std::size_t token = 0; token < 16 * piece.num_units; token += depth) {
    const std::size_t key = piece.first_key + token;
    const std::size_t unit = piece.num_units + token / 16;
    const char* group = piece.order[unit];
    if (keys.is_v_packed()) {
      char* to = ws.v_whole + token * dim;
      unpack_v_group(piece, unit, keys.v_scales(key), keys.block_size(), depth, dim, to);
      group = to;
    }
    if (key < range.first_key) {
      group = hide_rows<typename Form::Element>(group, key, range, depth, dim, ws.first_group);
    } else if (key + depth > end) {
      group = hide_rows<typename Form::Element>(group, key, range, depth, dim, ws.last_group);
    }
    for (std::size_t j = 0; j < num_columns; ++j) {
      lines[j] = group + j * column_bytes;
      far[j] = keys.is_v_packed() ? lines[j] : piece.at(unit, j * column_bytes + kFarBytes);
      near[j] = keys.is_v_packed() ? lines[j] : piece.at(unit, j * column_bytes + kNearBytes);
    }
    const Columns columns{lines, far, near, num_columns, column_bytes / 64};
    Form::multiply(state, rows, ws.probs + token, kPieceTokens, columns, {ws.out, dim, true, ws.prob_factors});
  }
}

template <class Form>
inline void write_answer(const AttendCall& call, const AttendRange& range, std::size_t rows, const Workspace<Form>& ws) {
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t to = row / call.group_size * range.heads_per_row + row % call.group_size;
    const float* from = ws.out + row * call.tiles.padded_dim;
    const float share = 1.0f / ws.sum[row];
    float* out = range.out + to * call.head_dim;
    for (std::size_t i = 0; i < call.head_dim; ++i) out[i] = from[i] * share;
    range.lse[to] = (ws.top[row] + log2f(ws.sum[row])) * kLogOf2;
  }
}

template <class Form>
void attend_as(const AttendCall& call, const AttendRange& range, char* workspace) {
  const std::size_t rows = range.num_rows * call.group_size;
  const std::size_t dim = call.tiles.padded_dim;
  const Workspace<Form> ws(workspace, call, rows);
  const Keys keys(call, range);
  const float scale = call.scale * kLog2OfE;
  typename Form::State state;
  float k_scales[kPieceTokens], v_scales[kPieceTokens];
  write_q<Form>(call, range, rows, ws);
  for (std::size_t row = 0; row < rows; ++row) {
    ws.top[row] = -INFINITY;
    ws.sum[row] = 0.0f;
  }
  memset(ws.out, 0, rows * dim * sizeof(float));
  const std::size_t last_key = range.first_key + range.num_keys;
  const std::size_t begin = range.first_key / keys.depth() * keys.depth();
  const std::size_t end = (last_key + keys.depth() - 1) / keys.depth() * keys.depth();
  for (std::size_t key = begin; key < end; key += kPieceTokens) {
    const Piece piece = make_piece(keys, key, end);
    score<Form>(state, keys, piece, rows, dim, ws);
    const bool is_edge = key < range.first_key || key + kPieceTokens > last_key;
    if (Form::kHasScales) {
      load_scales([&](std::size_t at) { return keys.k_scales(at); }, range, piece, k_scales);
      load_scales([&](std::size_t at) { return keys.v_scales(at); }, range, piece, v_scales);
    }
    for (std::size_t row = 0; row < rows; ++row) {
      float* scores = ws.scores + row * kPieceTokens;
      if (Form::kHasScales) {
        for (std::size_t i = 0; i < 16 * piece.num_units; i += 16) {
          (Lanes::load(scores + i) * Lanes::load(k_scales + i)).store(scores + i);
        }
      }
      if (call.slopes != nullptr) tilt_row(call, range, piece, row, scores);
      if (is_edge) hide_keys(range, piece, scores);
      soften_row<Form>(piece, row, rows, dim, scale, v_scales, ws);
    }
    add_values<Form>(state, keys, range, piece, rows, dim, ws);
  }
  write_answer<Form>(call, range, rows, ws);
}

// Calls use(form) with the best form for the numbers and rows. AMX needs two rows to beat a vector of bf16 products.
template <class Use>
inline void with_form(Number number, [[maybe_unused]] std::size_t rows, const Use& use) {
  switch (number) {
    case Number::kFp32:
      return use(Widened<float>{});
    case Number::kFp16:
      return use(Widened<Fp16>{});
    case Number::kBf16:
#if defined(AMBIDEX_EMULATE_TILES)
      return use(Bf16Tiles{});
#elif defined(__AMX_BF16__)
      if (rows >= 2) return use(Bf16Tiles{});
#endif
#if defined(__AVX512BF16__)
      return use(Bf16Dot{});
#else
      return use(Widened<Bf16>{});
#endif
    case Number::kInt8:
#if defined(AMBIDEX_EMULATE_TILES)
      return use(Int8Tiles{});
#elif defined(__AMX_BF16__)
      if (rows >= 2) return use(Int8Tiles{});
#endif
      return use(Int8Dot{});
    default:  // quantised types are of weights alone: no call names them
      return;
  }
}

void attend_range(const AttendCall& call, const AttendRange& range, char* workspace) {
  with_form(call.number, range.num_rows * call.group_size, [&](auto form) {
    attend_as<decltype(form)>(call, range, workspace);
  });
}

std::size_t workspace_bytes(const AttendCall& call, std::size_t rows) {
  std::size_t bytes = 0;
  with_form(call.number, rows, [&](auto form) { bytes = Workspace<decltype(form)>(nullptr, call, rows).bytes; });
  return bytes;
}

void exp2_each(const float* x, float* y, std::size_t num) {
  for (std::size_t i = 0; i < num; i += 16) {
    float some[16] = {};
    const std::size_t count = num - i < 16 ? num - i : 16;
    memcpy(some, x + i, count * sizeof(float));
    exp2_of(Lanes::load(some)).store(some);
    memcpy(y + i, some, count * sizeof(float));
  }
}

}  // namespace ambidex::AMBIDEX_ISA
