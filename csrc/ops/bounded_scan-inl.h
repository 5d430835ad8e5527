// The scan of bounded attention, compiled once per instruction set (per_isa.cpp).
//
// With the query rounded to 16-bit integers, q ≈ f · n, and a key's scanned row s · m (8-bit integers m), of which K itself
// may differ by s / 2 in each number,
//
//   |q·k - f·s n·m| <= ‖q‖₁ · s / 2 + ‖q - f·n‖ · ‖s·m‖        ‖q - f·n‖ <= f / 2 · √D
//
// The first term is 0 where the scanned keys are K. In units of an eighth of a factor of 2, with the constants of a row,
//
//   upper = (factor · n·m + slope) · s + shift        code = upper, rounded down
//   lower = (factor · n·m - slope) · s - shift        added up as a power of 2 that is not too large
//
// Keys are read in the order of the range, 64 at a time, for all rows; everything else of a piece stays in the nearest
// cache but its codes, of which nothing is read before all keys of the group are scanned: they are counted from registers,
// and their lines in memory are fetched before they are written, since nothing behind a store that waits is done. As in
// attention-inl.h lines are fetched far and near ahead. Products of tiles take a fifth of a piece's time: memory would idle
// for the rest of it, so there lines are fetched bit by bit while codes are counted, into the first cache those of the
// piece after the one that is multiplied by then.
#pragma once

#include "ops/bounded_queries-inl.h"
#include "simd/code_lanes.h"

namespace ambidex::AMBIDEX_ISA {

static_assert(kPieceTokens == kCodes, "a piece of keys is what codes are handled of at once");

// What fp32 may take from a score: a product of 32-bit integers, three factors and two sums round by 2^-24 of at most
// 127 · s · ‖q‖₁ each.
constexpr float kScoreRounding = 1e-4f;
constexpr float kHalfAndRounding = 0.5006f;
constexpr float kQueryRounding = 0.502f;
constexpr float kCodesOfUnit = static_cast<float>(kCodesPerUnit);
constexpr float kBitsOfCode = 0x1p23f / kCodesOfUnit;  // of a number's logarithm, in its bits
constexpr int kLeastCode = -32768;
constexpr int kDeepest = static_cast<int>(kNumCounts) - 1;
// Scales of this many pieces ahead are fetched: 64 keys take longer than memory does.
constexpr std::size_t kScalePiecesAhead = 3;
// Copies of a row's counts, so that keys of one code do not wait for each other.
constexpr std::size_t kCountCopies = 2;

// Products of 64 keys with the rows: those of the vector forms as fp32 [rows, 64].
template <class Form>
struct ScanProducts {
  using Multiply = Form;
  static constexpr bool kFetches = true;
  static std::size_t stride() { return kPieceTokens; }
  static std::size_t bytes(std::size_t rows) { return rows * kPieceTokens * sizeof(float); }
  static Lanes load(const float* products, std::size_t, std::size_t row, std::size_t i) {
    return Lanes::load(products + row * kPieceTokens + i);
  }
};

#if defined(AMBIDEX_EMULATE_TILES) || defined(__AMX_BF16__)

// Sum tiles as they are, 16 rows of 64 integers for 8 rows: those of high bytes, then those of low bytes.
struct RawInt8Tiles : Int8Tiles {
  template <int kCount>
  static void end_sums(Tiles& tiles, const Sums& sums, std::size_t) {
    constexpr std::size_t kRowBytes = kPieceTokens * sizeof(int32_t);
    tiles.store<kSum>(sums.data, kRowBytes);
    if constexpr (kCount > 1) tiles.store<kSum + 1>(sums.data + 16, kRowBytes);
    if constexpr (kCount > 2) tiles.store<kSum + 2>(sums.data + 32, kRowBytes);
    if constexpr (kCount > 3) tiles.store<kSum + 3>(sums.data + 48, kRowBytes);
  }
  static void multiply(Tiles& tiles, std::size_t rows, const Operand* left, std::size_t stride, const Columns& columns,
                       const Sums& sums) {
    multiply_in_tiles<RawInt8Tiles>(tiles, rows, reinterpret_cast<const char*>(left), stride, columns, sums);
  }
};

template <>
struct ScanProducts<Int8Tiles> {
  using Multiply = RawInt8Tiles;
  static constexpr bool kFetches = false;
  static constexpr std::size_t kTileInts = kTileRows * kPieceTokens;
  static std::size_t stride() { return kTileInts / Int8Tiles::kRows; }
  static std::size_t bytes(std::size_t rows) { return num_tiles(rows, Int8Tiles::kRows) * kTileInts * sizeof(int32_t); }
  static Lanes load(const float* products, std::size_t rows, std::size_t row, std::size_t i) {
    const std::size_t in_tile = rows < Int8Tiles::kRows ? rows : Int8Tiles::kRows;
    const auto* high = reinterpret_cast<const int32_t*>(products) + row / Int8Tiles::kRows * kTileInts +
                       row % Int8Tiles::kRows * kPieceTokens + i;
    return to_lanes(add_to_256_times(IntLanes::load(high), IntLanes::load(high + in_tile * kPieceTokens)));
  }
};

#endif

// Counts of a row's codes by their low byte: codes that far apart are never counted side by side.
struct CodeCounts {
  uint16_t counts[kCountCopies][kNumCounts];
};

template <class Form>
struct ScanSpace {
  ScanSpace(char* base, const BoundedCall& call, std::size_t rows) {
    const std::size_t dim = call.scan.tiles.padded_dim;
    Carver carver(base);
    q = carver.take<typename Form::Operand>(Form::operand_bytes(rows, dim));
    q_rows = carver.take<float>(rows * dim * sizeof(float));
    for (float*& of_piece : products) of_piece = carver.take<float>(ScanProducts<Form>::bytes(rows));
    ones = carver.take<float>(rows * sizeof(float));
    row_constants = carver.take<RowConstants>(rows * sizeof(RowConstants));
    sums = carver.take<float>(rows * 16 * sizeof(float));
    counts = carver.take<CodeCounts>(rows * sizeof(CodeCounts));
    bytes = carver.used();
  }

  struct RowConstants {
    float factor, slope, shift;  // in eighths
    float most;                  // no score without its slope is larger
    float bits;                  // of a lower score's power: what is added
    int top;                     // largest code so far
  };

  typename Form::Operand* q;  // [rows, padded_dim]
  float* q_rows;              // [rows, padded_dim]
  float* products[2];         // of two pieces in turn
  float* ones;                // [rows]: factors of products
  RowConstants* row_constants;
  float* sums;                // [rows, 16]: of powers of lower scores
  CodeCounts* counts;         // [rows]
  std::size_t bytes;
};

// Places of a range's keys in the pool, 16 at a time, in order.
class UnitWalk {
 public:
  UnitWalk(const AttendCall& call, const AttendRange& range, std::size_t first_key)
      : block_ids_(range.block_ids + first_key / call.tiles.block_size),
        block_size_(call.tiles.block_size),
        offset_(first_key % call.tiles.block_size) {}

  // NOTE: called for no unit behind the range's last key: its block would not be there.
  std::size_t next() {
    const std::size_t slot = static_cast<std::size_t>(*block_ids_) * block_size_ + offset_;
    offset_ += 16;
    if (offset_ == block_size_) {
      offset_ = 0;
      ++block_ids_;
    }
    return slot;
  }

 private:
  const int64_t* block_ids_;
  std::size_t block_size_, offset_;
};

template <class Form>
class Scanner {
 public:
  Scanner(const BoundedCall& bounded, const ScanRange& range, char* workspace)
      : bounded_(bounded),
        call_(bounded.scan),
        to_(range),
        range_(range.keys),
        rows_(range.keys.num_rows * call_.group_size),
        dim_(call_.tiles.padded_dim),
        ws_(workspace, bounded, rows_),
        k_(call_.k + range_.kv_head * call_.num_blocks * call_.tiles.record_bytes),
        scales_(call_.k_scales + range_.kv_head * call_.num_blocks * call_.tiles.block_size),
        first_(range_.first_key / kPieceTokens * kPieceTokens),
        end_((range_.first_key + range_.num_keys + 15) / 16 * 16),
        tuning_(bounded.tuning),
        units_ahead_(find_units_ahead()),
        walk_(call_, range_, first_) {
    far_.lines_at_once = near_.lines_at_once = dim_ / (rows_ * (kPieceTokens / 8)) + 1;
  }

  void run() {
    for (std::size_t i = 0; i < kUnitsKnown; ++i) find_unit();
    // The first units are fetched at once: nothing before them did.
    for (std::size_t i = 0; i < units_ahead_ && i < num_found_; ++i) {
      const char* unit = k_ + slots_[i] * dim_;
      for (std::size_t line = 0; line < 16 * dim_; line += 64) prefetch_to_l2(unit + line);
    }
    for (std::size_t i = 0; i < kScalePiecesAhead * kPieceUnits; ++i) fetch_scales(i);
    for (std::size_t i = 0; i < tuning_.code_pieces_ahead; ++i) fetch_codes(first_ + i * kPieceTokens);
    prepare();
    // A piece is multiplied before the one in front of it is raised: its sums take their time to get to memory.
    multiply_piece(first_);
    for (std::size_t key = first_; key < end_; key += kPieceTokens) {
      if (key + kPieceTokens < end_) multiply_piece(key + kPieceTokens);
      raise_piece(key);
    }
    finish();
  }

 private:
  // Units whose places are known: the piece's own, those whose scales are fetched, and those whose keys are, with 32 dims
  // at least.
  static constexpr std::size_t kUnitsKnown = 2 * kPieceUnits + kFarBytes / (16 * 32), kRing = 64;
  static_assert(kUnitsKnown <= kRing && kUnitsKnown >= (kScalePiecesAhead + 1) * kPieceUnits);

  std::size_t find_units_ahead() const {
    const std::size_t units = tuning_.scan_far_bytes / (16 * dim_), most = kUnitsKnown - 2 * kPieceUnits;
    return units < most ? units : most;
  }

  void find_unit() {
    if (first_ + 16 * num_found_ >= end_) return;
    slots_[num_found_ % kRing] = walk_.next();
    ++num_found_;
  }

  std::size_t slot(std::size_t unit) const { return slots_[unit % kRing]; }

  void fetch_scales(std::size_t unit) const {
    if (unit < num_found_) prefetch(reinterpret_cast<const char*>(scales_ + slot(unit)));
  }

  // Rounds the queries, and finds what products may be off by.
  void prepare() {
    const Norms norms = longest(bounded_, range_);
    *to_.value_norm = norms.v;
    widen_queries(call_, range_, rows_, ws_.q_rows);
    const float scale = call_.scale * kLog2OfE * kCodesOfUnit;
    for (std::size_t row = 0; row < rows_; ++row) {
      const float* q = ws_.q_rows + row * dim_;
      Lanes sum = Lanes::zero(), squares = Lanes::zero();
      for (std::size_t i = 0; i < dim_; i += 16) {
        const Lanes x = Lanes::load(q + i);
        sum = sum + absolute(x);
        squares = mul_add(x, x, squares);
      }
      const float factor = largest_magnitude(q, dim_) / kLargestOperand;
      const float root = sqrtf(static_cast<float>(dim_));
      auto& of_row = ws_.row_constants[row];
      of_row.factor = scale * factor;
      of_row.slope = scale * sum_of(sum) * (bounded_.rows != nullptr ? kHalfAndRounding : kScoreRounding);
      of_row.shift = scale * factor * kQueryRounding * root * norms.k;
      of_row.top = kLeastCode;
      to_.shifts[row] = of_row.shift / kCodesOfUnit;
      of_row.most = scale * 1.01f * sqrtf(sum_of(squares)) * norms.k + of_row.shift;
      ws_.ones[row] = 1.0f;
      const Lanes to_integer = Lanes::broadcast(factor == 0.0f ? 0.0f : 1.0f / factor);
      for (std::size_t i = 0; i < dim_; i += 16) {
        Form::write(ws_.q, dim_, row, rows_, i, Lanes::load(q + i) * to_integer);
      }
    }
    memset(ws_.sums, 0, rows_ * 16 * sizeof(float));
    memset(static_cast<void*>(ws_.counts), 0, rows_ * sizeof(CodeCounts));
  }

  bool is_visible(std::size_t key) const {
    return key >= range_.first_key && key < range_.first_key + range_.num_keys;
  }

  std::size_t unit_of(std::size_t key) const { return (key - first_) / 16; }
  std::size_t num_units(std::size_t key) const { return end_ - key < kPieceTokens ? (end_ - key) / 16 : kPieceUnits; }
  float* products_of(std::size_t key) const { return ws_.products[(key - first_) / kPieceTokens % 2]; }

  void multiply_piece(std::size_t key) {
    const std::size_t first = unit_of(key), num = num_units(key);
    using Products = ScanProducts<Form>;
    const bool fetches_near = Products::kFetches || !tuning_.is_near_fetched_late;
    const char* units[kPieceUnits] = {};
    for (std::size_t i = 0; i < num && i < kPieceUnits; ++i) {
      const std::size_t next = first + i + units_ahead_, soon = first + i + (fetches_near ? 1 : kPieceUnits);
      units[i] = k_ + slot(first + i) * dim_;
      far_.units[i] = next < num_found_ ? k_ + slot(next) * dim_ : units[i];
      near_.units[i] = soon < num_found_ ? k_ + slot(soon) * dim_ : units[i];
    }
    far_.begin(num, dim_ / 4);
    near_.begin(fetches_near ? 0 : num, dim_ / 4);
    for (std::size_t i = 0; i < kPieceUnits; ++i) fetch_scales(first + kScalePiecesAhead * kPieceUnits + i);
    const Columns columns{units, Products::kFetches ? far_.units : nullptr, fetches_near ? near_.units : nullptr, num,
                          dim_ / 4};
    Products::Multiply::multiply(state_, rows_, ws_.q, dim_, columns,
                                 {products_of(key), Products::stride(), false, ws_.ones});
    for (std::size_t i = 0; i < kPieceUnits; ++i) find_unit();
  }

  void raise_piece(std::size_t key) {
    alignas(64) float scales[kPieceTokens], bits[kPieceTokens];
    const bool is_edge = !is_visible(key) || !is_visible(key + kPieceTokens - 1);
    fetch_codes(key + tuning_.code_pieces_ahead * kPieceTokens);
    load_scales(key, is_edge, scales, bits);
    for (std::size_t row = 0; row < rows_; ++row) raise_row(key, is_edge, row, scales, bits);
  }

  // Scales of a piece's keys, 0 where a key is not visible; and the same times kBitsOfCode.
  void load_scales(std::size_t key, bool is_edge, float* to, float* bits) {
    for (std::size_t i = 0; i < kPieceUnits; ++i) {
      if (i < num_units(key)) {
        memcpy(to + 16 * i, scales_ + slot(unit_of(key) + i), 16 * sizeof(float));
      } else {
        memset(to + 16 * i, 0, 16 * sizeof(float));
      }
    }
    if (is_edge) {
      for (std::size_t i = 0; i < kPieceTokens; ++i) to[i] = is_visible(key + i) ? to[i] : 0.0f;
    }
    for (std::size_t i = 0; i < kPieceTokens; i += 16) {
      const Lanes line = Lanes::load(to + i);
      scale_sum_ = scale_sum_ + line;
      most_scale_ = larger(line, most_scale_);
      (line * Lanes::broadcast(kBitsOfCode)).store(bits + i);
    }
  }

  // The lines that a piece's codes go to.
  void fetch_codes(std::size_t key) const {
    if (tuning_.code_pieces_ahead == 0 || key >= end_) return;
    char* codes = reinterpret_cast<char*>(to_.codes + (key - to_.base) * rows_);
    for (std::size_t i = 0; i < rows_ * kPieceTokens * sizeof(int16_t); i += 64) prefetch_to_write(codes + i);
  }

  void raise_row(std::size_t key, bool is_edge, std::size_t row, const float* scales, const float* bits) {
    auto& of_row = ws_.row_constants[row];
    const std::size_t place = ((key - to_.base) * rows_) + row * kPieceTokens;
    int16_t* codes = to_.codes + place;
    const Lanes factor = Lanes::broadcast(of_row.factor), slope = Lanes::broadcast(of_row.slope);
    const Lanes shift = Lanes::broadcast(of_row.shift - 0.5f);  // codes are rounded to the nearest
    Lanes raised[kPieceUnits], upper[kPieceUnits];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPieceUnits; ++i) {
      const Lanes scale = Lanes::load(scales + 16 * i);
      const Lanes product = ScanProducts<Form>::load(products_of(key), rows_, row, 16 * i);
      raised[i] = mul_add(product, factor, slope);
      upper[i] = mul_add(raised[i], scale, shift);
      if (to_.scores != nullptr) {
        (product * scale * Lanes::broadcast(of_row.factor / kCodesOfUnit)).store(to_.scores + place + 16 * i);
      }
    }
    Codes in_order = to_codes(upper);
    in_order.store(codes);
    if (is_edge) {
      hide(key, codes);
      in_order = Codes::load(codes);
    }
    if (any_above(in_order, of_row.top)) rise(row, largest_code(in_order));
    // Lower scores: twice the slope below the upper ones, but for the shift.
    const Lanes down = Lanes::broadcast(-2.0f * of_row.slope), base = Lanes::broadcast(of_row.bits);
    Lanes powers[kPieceUnits];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPieceUnits; ++i) {
      powers[i] = power_from_bits(mul_add(raised[i] + down, Lanes::load(bits + 16 * i), base));
    }
    if (is_edge) hide_powers(key, powers);
    const Lanes sum = (powers[0] + powers[1]) + (powers[2] + powers[3]);
    (Lanes::load(ws_.sums + 16 * row) + sum).store(ws_.sums + 16 * row);
    count(key, is_edge, row, in_order);
  }

  void hide(std::size_t key, int16_t* codes) const {
    for (std::size_t i = 0; i < kPieceTokens; ++i) {
      if (!is_visible(key + i)) codes[i] = static_cast<int16_t>(kLeastCode);
    }
  }
  void hide_powers(std::size_t key, Lanes* powers) const {
    for (std::size_t i = 0; i < kPieceUnits; ++i) {
      float some[16];
      powers[i].store(some);
      for (std::size_t j = 0; j < 16; ++j) some[j] = is_visible(key + 16 * i + j) ? some[j] : 0.0f;
      powers[i] = Lanes::load(some);
    }
  }

  // A larger top: sums are in units of it, and codes that are now too far from it are counted with the deepest.
  void rise(std::size_t row, int top) {
    auto& of_row = ws_.row_constants[row];
    const int old = of_row.top;
    of_row.top = top;
    of_row.bits = 127.0f * 0x1p23f - (static_cast<float>(top) + of_row.shift) * kBitsOfCode;
    if (old == kLeastCode) return;
    float* sums = ws_.sums + 16 * row;
    (Lanes::load(sums) * Lanes::broadcast(exp2f(static_cast<float>(old - top) / kCodesOfUnit))).store(sums);
    const int num_deep = top - old < static_cast<int>(kNumCounts) ? top - old : static_cast<int>(kNumCounts);
    for (auto& counts : ws_.counts[row].counts) {
      unsigned deep = 0;
      for (int i = 0; i < num_deep; ++i) {
        uint16_t& from = counts[static_cast<uint8_t>(old - kDeepest + i)];
        deep += from;
        from = 0;
      }
      counts[static_cast<uint8_t>(top - kDeepest)] = static_cast<uint16_t>(counts[static_cast<uint8_t>(top - kDeepest)] + deep);
    }
  }

  void count(std::size_t key, bool is_edge, std::size_t row, const Codes& codes) {
    const int least = ws_.row_constants[row].top - kDeepest;
    auto& counts = ws_.counts[row].counts;
    uint8_t bytes[kPieceTokens];
    low_bytes(codes, least, bytes);
    if (is_edge) {
      for (std::size_t i = 0; i < kPieceTokens; ++i) {
        if (is_visible(key + i)) ++counts[0][bytes[i]];
      }
      return;
    }
    for (std::size_t i = 0; i < kPieceTokens; i += 8) {
      if (!ScanProducts<Form>::kFetches) {
        far_.fetch([](const char* line) { prefetch_to_l2(line); });
        near_.fetch([](const char* line) { prefetch(line); });
      }
#pragma GCC unroll 8
      for (std::size_t j = 0; j < 8; ++j) ++counts[j % kCountCopies][bytes[i + j]];
    }
  }

  void finish() {
    // Infinite and NaN scales stay so in a sum, and times 0.
    const float of_scales = sum_of(scale_sum_) * 0.0f, most_scale = largest_of(most_scale_);
    for (std::size_t row = 0; row < rows_; ++row) {
      const auto& of_row = ws_.row_constants[row];
      const int top = of_row.top;
      const bool is_known = of_scales == 0.0f && of_row.most + of_row.slope * most_scale < kMostUnits * kCodesOfUnit;
      to_.tops[row] = top;
      to_.lowers[row] = is_known ? sum_of(Lanes::load(ws_.sums + 16 * row)) / (kMostPower * (1.0f + 0x1p-12f)) : NAN;
      const auto& counts = ws_.counts[row].counts;
      uint16_t* to = to_.counts + row * kNumCounts;
      for (std::size_t i = 0; i < kNumCounts; ++i) to[i] = static_cast<uint16_t>(counts[0][i] + counts[1][i]);
    }
  }

  const BoundedCall& bounded_;
  const AttendCall& call_;
  const ScanRange& to_;
  const AttendRange& range_;
  std::size_t rows_, dim_;
  ScanSpace<Form> ws_;
  const char* k_;
  const float* scales_;
  std::size_t first_, end_;
  const BoundedTuning& tuning_;
  std::size_t units_ahead_;
  UnitWalk walk_;
  // Lines of a piece's units that are fetched some at a time: all are after as many calls as a piece's rows make.
  struct Fetching {
    const char* units[kPieceUnits];
    std::size_t num_units, unit, unit_lines;
    const char* next;
    std::size_t lines_left, lines_at_once;  // of the unit

    void begin(std::size_t num, std::size_t lines) {
      num_units = num;
      unit = 0;
      unit_lines = lines;
      next = units[0];
      lines_left = num == 0 ? 0 : lines;
    }
    template <class Fetch>
    void fetch(const Fetch& fetch_line) {
      const std::size_t num = lines_at_once < lines_left ? lines_at_once : lines_left;
      for (std::size_t i = 0; i < num; ++i) fetch_line(next + 64 * i);
      next += 64 * num;
      lines_left -= num;
      if (lines_left == 0 && unit + 1 < num_units) {
        next = units[++unit];
        lines_left = unit_lines;
      }
    }
  };

  std::size_t slots_[kRing];  // of the units from the present piece on, and of those that are fetched
  std::size_t num_found_ = 0;
  Fetching far_{}, near_{};
  typename Form::State state_;
  Lanes scale_sum_ = Lanes::zero(), most_scale_ = Lanes::zero();
};

}  // namespace ambidex::AMBIDEX_ISA
