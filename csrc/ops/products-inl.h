// The one product that attention consists of, q·K and P·V alike:
//
//   sum[row][16 j + lane] (+)= factor[row] * Σ_i left[row][i] * lines_j[i / pack][lane][i % pack]
//
// for columns j of `num_lines` lines each, in one form per element type and instruction set. Forms differ in how the left
// operand is kept: fp32 (Widened), bf16 (Bf16Dot, Bf16Tiles) or 16-bit integers with a factor (Int8Dot, Int8Tiles).
#pragma once

#include "simd/lanes.h"
#include "simd/tiles.h"

namespace ambidex::AMBIDEX_ISA {

// Rows whose sums stay in registers: 16 vector registers hold 4 rows of two halves, 32 hold 8 rows and more.
#if defined(__AVX512F__)
constexpr std::size_t kRowsAtOnce = 8;
#else
constexpr std::size_t kRowsAtOnce = 4;
#endif

// The right operand: column j begins at lines[j]. While a line is used, that of far[j] is fetched into the second cache
// and that of near[j] into the first: the second has room for three times as many fetches at once. With tiles both may be
// null: then somebody else fetches.
struct Columns {
  const char* const* lines;
  const char* const* far;
  const char* const* near;
  std::size_t num_columns;
  std::size_t num_lines;  // of a column; a multiple of 4
};

struct Sums {
  float* data;
  std::size_t stride;       // floats from row to row
  bool add;                 // to what is there
  const float* factors;     // by row; only for integers
};

// Independent sums of one row, so that few rows do not wait for the latency of an addition (4-5 cycles).
template <std::size_t kRows>
constexpr std::size_t kChains = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;

template <class Form, std::size_t kRows, bool kFetch>
inline void multiply_rows(const typename Form::Operand* left, std::size_t stride, const char* lines, const char* far,
                          const char* near, std::size_t num_lines, const Sums& to) {
  using Sum = typename Form::Sum;
  constexpr std::size_t kCount = kChains<kRows>;
  Sum sums[kRows][kCount];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (std::size_t c = 0; c < kCount; ++c) sums[r][c] = Sum::zero();
  }
  for (std::size_t i = 0; i < num_lines; i += 4) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < 4; ++j) {
      if (kFetch) {
        prefetch_to_l2(far + (i + j) * 64);
        prefetch(near + (i + j) * 64);
      }
      typename Form::Part parts[Form::kParts];
      load_line(reinterpret_cast<const typename Form::Element*>(lines + (i + j) * 64), parts);
#pragma GCC unroll 2
      for (std::size_t p = 0; p < Form::kParts; ++p) {
        const typename Form::Operand* x = left + ((i + j) * Form::kParts + p) * Form::kOperands;
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
          Sum& sum = sums[r][(j * Form::kParts + p) % kCount];
          sum = Form::add_product(sum, x + r * stride, parts[p]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kRows; ++r) {
    Sum sum = sums[r][0];
#pragma GCC unroll 4
    for (std::size_t c = 1; c < kCount; ++c) sum = sum + sums[r][c];
    Lanes x = Form::finish(sum, to.factors + r);
    if (to.add) x = x + Lanes::load(to.data + r * to.stride);
    x.store(to.data + r * to.stride);
  }
}

template <class Form, bool kFetch>
inline void multiply_some(std::size_t rows, const typename Form::Operand* left, std::size_t stride, const char* lines,
                          const char* far, const char* near, std::size_t num_lines, const Sums& to) {
  switch (rows) {
    case 1:
      return multiply_rows<Form, 1, kFetch>(left, stride, lines, far, near, num_lines, to);
    case 2:
      return multiply_rows<Form, 2, kFetch>(left, stride, lines, far, near, num_lines, to);
    case 3:
      return multiply_rows<Form, 3, kFetch>(left, stride, lines, far, near, num_lines, to);
    case 4:
      return multiply_rows<Form, 4, kFetch>(left, stride, lines, far, near, num_lines, to);
#if defined(__AVX512F__)
    case 5:
      return multiply_rows<Form, 5, kFetch>(left, stride, lines, far, near, num_lines, to);
    case 6:
      return multiply_rows<Form, 6, kFetch>(left, stride, lines, far, near, num_lines, to);
    case 7:
      return multiply_rows<Form, 7, kFetch>(left, stride, lines, far, near, num_lines, to);
    case 8:
      return multiply_rows<Form, 8, kFetch>(left, stride, lines, far, near, num_lines, to);
#endif
  }
}

// For each column in turn all rows, so that its lines are in the nearest cache for all but the first rows.
template <class Form>
inline void multiply_vectors(std::size_t rows, const typename Form::Operand* left, std::size_t stride,
                             const Columns& columns, const Sums& sums) {
  const std::size_t lines = columns.num_lines;
  for (std::size_t j = 0; j < columns.num_columns; ++j) {
    for (std::size_t row = 0; row < rows; row += kRowsAtOnce) {
      const std::size_t some = rows - row < kRowsAtOnce ? rows - row : kRowsAtOnce;
      const Sums to{sums.data + row * sums.stride + 16 * j, sums.stride, sums.add, sums.factors + row};
      const auto* from = left + row * stride;
      if (row == 0) {
        multiply_some<Form, true>(some, from, stride, columns.lines[j], columns.far[j], columns.near[j], lines, to);
      } else {
        multiply_some<Form, false>(some, from, stride, columns.lines[j], nullptr, nullptr, lines, to);
      }
    }
  }
}

// Elements are widened to fp32, the left operand is fp32: exact products, fp32 sums.
template <class ElementT>
struct Widened {
  using Element = ElementT;
  using Operand = float;
  using Sum = Lanes;
  using Part = Lanes;
  static constexpr std::size_t kParts = 4 / sizeof(Element);
  static constexpr std::size_t kOperands = 1;  // a part takes
  struct State {};  // that lasts through a range
  static constexpr bool kHasScales = false;

  static Lanes add_product(Lanes sum, const float* x, Lanes part) { return mul_add(Lanes::broadcast(*x), part, sum); }
  static Lanes finish(Lanes sum, const float*) { return sum; }

  // Operands of `rows` rows take this many bytes.
  static std::size_t operand_bytes(std::size_t rows, std::size_t depth) { return rows * depth * sizeof(Operand); }
  static void write(Operand* left, std::size_t stride, std::size_t row, std::size_t, std::size_t at, Lanes x) {
    x.store(left + row * stride + at);
  }
  static void multiply(State&, std::size_t rows, const Operand* left, std::size_t stride, const Columns& columns,
                       const Sums& sums) {
    multiply_vectors<Widened>(rows, left, stride, columns, sums);
  }
};

// Left operands are integers of up to 15 bits and a sign.
constexpr float kLargestOperand = 32512.0f;  // 127 * 256: its high byte, rounded, is at most 127

// int8 elements and 16-bit left operands, summed exactly in 32 bits: 127 * 32512 * 256 dims < 2^31.
struct Int8Dot {
  using Element = int8_t;
  using Operand = int16_t;
  using Sum = IntLanes;
  using Part = IntLanes;
  static constexpr std::size_t kParts = 2;
  static constexpr std::size_t kOperands = 2;
  struct State {};  // that lasts through a range
  static constexpr bool kHasScales = true;

  static IntLanes add_product(IntLanes sum, const int16_t* x, IntLanes part) {
    return add_pair_products(sum, IntLanes::broadcast_pair(x), part);
  }
  static Lanes finish(IntLanes sum, const float* factor) { return to_lanes(sum) * Lanes::broadcast(*factor); }

  static std::size_t operand_bytes(std::size_t rows, std::size_t depth) { return rows * depth * sizeof(Operand); }
  static void write(Operand* left, std::size_t stride, std::size_t row, std::size_t, std::size_t at, Lanes x) {
    store_int16_crossed(x, left + row * stride + at);
  }
  static void multiply(State&, std::size_t rows, const Operand* left, std::size_t stride, const Columns& columns,
                       const Sums& sums) {
    multiply_vectors<Int8Dot>(rows, left, stride, columns, sums);
  }
};

#if defined(__AVX512BF16__)

// bf16 by bf16, pairs of products added into fp32 by one instruction.
struct Bf16Line {
  __m512i x;
};
inline void load_line(const Bf16* p, Bf16Line (&parts)[1]) { parts[0] = {_mm512_loadu_si512(p)}; }

struct Bf16Dot {
  using Element = Bf16;
  using Operand = Bf16;
  using Sum = Lanes;
  using Part = Bf16Line;
  static constexpr std::size_t kParts = 1;
  static constexpr std::size_t kOperands = 2;
  struct State {};  // that lasts through a range
  static constexpr bool kHasScales = false;

  static Lanes add_product(Lanes sum, const Bf16* x, Bf16Line part) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return {_mm512_dpbf16_ps(sum.x, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                             reinterpret_cast<__m512bh>(part.x))};
  }
  static Lanes finish(Lanes sum, const float*) { return sum; }

  static std::size_t operand_bytes(std::size_t rows, std::size_t depth) { return rows * depth * sizeof(Operand); }
  static void write(Operand* left, std::size_t stride, std::size_t row, std::size_t, std::size_t at, Lanes x) {
    store_bf16(x, left + row * stride + at);
  }
  static void multiply(State&, std::size_t rows, const Operand* left, std::size_t stride, const Columns& columns,
                       const Sums& sums) {
    multiply_vectors<Bf16Dot>(rows, left, stride, columns, sums);
  }
};

#endif

#if defined(AMBIDEX_EMULATE_TILES) || defined(__AMX_BF16__)

constexpr std::size_t kTileRows = 16;

inline std::size_t num_tiles(std::size_t rows, std::size_t rows_of_tile) {
  return (rows + rows_of_tile - 1) / rows_of_tile;
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Sum tile kSum + kNumber += left tile * the lines of column kNumber. Right tiles alternate: one is loaded
// while the other is multiplied.
template <class Form, int kNumber>
inline void add_tile_product(Tiles& tiles, const Columns& columns, std::size_t line,
                             std::size_t lines_of_tile) {
  constexpr int kOperand = kRight + kNumber % 2;
  if (columns.far != nullptr) {
    const char* far = columns.far[kNumber] + line * 64;
    for (std::size_t i = 0; i < lines_of_tile; ++i) prefetch_to_l2(far + i * 64);
  }
  if (columns.near != nullptr) {
    const char* near = columns.near[kNumber] + line * 64;
    for (std::size_t i = 0; i < lines_of_tile; ++i) prefetch(near + i * 64);
  }
  tiles.load<kOperand>(columns.lines[kNumber] + line * 64, 64);
  Form::template add_product<kSum + kNumber, kLeft, kOperand>(tiles);
}

// Up to 16 rows of left (`left` is their first byte) times kCount columns, in as many sum tiles.
template <class Form, int kCount>
inline void multiply_columns(Tiles& tiles, const char* left, std::size_t stride, const Columns& columns,
                             std::size_t lines_of_tile, const Sums& sums, std::size_t rows) {
  Form::template begin_sums<kCount>(tiles, sums);
  for (std::size_t line = 0; line < columns.num_lines; line += lines_of_tile) {
    tiles.load<kLeft>(left + line * 4, stride);
    add_tile_product<Form, 0>(tiles, columns, line, lines_of_tile);
    if constexpr (kCount > 1) add_tile_product<Form, 1>(tiles, columns, line, lines_of_tile);
    if constexpr (kCount > 2) add_tile_product<Form, 2>(tiles, columns, line, lines_of_tile);
    if constexpr (kCount > 3) add_tile_product<Form, 3>(tiles, columns, line, lines_of_tile);
  }
  Form::template end_sums<kCount>(tiles, sums, rows);
}

// Four columns at a time (as many sum tiles hide each other's latency), and for them all rows, so that their lines are
// in the nearest cache for all but the first rows.
template <class Form>
inline void multiply_in_tiles(Tiles& tiles, std::size_t rows, const char* left, std::size_t stride,
                              const Columns& columns, const Sums& sums) {
  const std::size_t lines_of_tile = columns.num_lines % 16 == 0 ? 16 : columns.num_lines % 8 == 0 ? 8 : 4;
  tiles.configure({rows < Form::kRows ? Form::tile_rows(rows) : kTileRows, lines_of_tile});
  for (std::size_t j = 0; j < columns.num_columns; j += 4) {
    const std::size_t count = columns.num_columns - j < 4 ? columns.num_columns - j : 4;
    for (std::size_t row = 0; row < rows; row += Form::kRows) {
      const std::size_t some = rows - row < Form::kRows ? rows - row : Form::kRows;
      const Columns part{columns.lines + j, row == 0 && columns.far != nullptr ? columns.far + j : nullptr,
                         row == 0 && columns.near != nullptr ? columns.near + j : nullptr, count, columns.num_lines};
      const Sums to{sums.data + row * sums.stride + 16 * j, sums.stride, sums.add, sums.factors + row};
      const char* from = left + row / Form::kRows * kTileRows * stride;
      if (count == 4) {
        multiply_columns<Form, 4>(tiles, from, stride, part, lines_of_tile, to, some);
      } else if (count == 3) {
        multiply_columns<Form, 3>(tiles, from, stride, part, lines_of_tile, to, some);
      } else if (count == 2) {
        multiply_columns<Form, 2>(tiles, from, stride, part, lines_of_tile, to, some);
      } else {
        multiply_columns<Form, 1>(tiles, from, stride, part, lines_of_tile, to, some);
      }
    }
  }
}

// bf16 by bf16, 16 rows at a time. Sums go straight to memory, so theirs must have room for whole tiles of rows.
struct Bf16Tiles {
  using Element = Bf16;
  using Operand = Bf16;
  using State = Tiles;
  static constexpr std::size_t kRows = kTileRows;
  static constexpr bool kHasScales = false;

  static std::size_t tile_rows(std::size_t rows) { return rows; }
  template <int kInto, int kA, int kB>
  static void add_product(Tiles& tiles) {
    tiles.add_bf16_product<kInto, kA, kB>();
  }
  template <int kCount>
  static void begin_sums(Tiles& tiles, const Sums& sums) {
    begin_sum<0>(tiles, sums);
    if constexpr (kCount > 1) begin_sum<1>(tiles, sums);
    if constexpr (kCount > 2) begin_sum<2>(tiles, sums);
    if constexpr (kCount > 3) begin_sum<3>(tiles, sums);
  }
  template <int kCount>
  static void end_sums(Tiles& tiles, const Sums& sums, std::size_t) {
    const std::size_t stride = sums.stride * sizeof(float);
    tiles.store<kSum>(sums.data, stride);
    if constexpr (kCount > 1) tiles.store<kSum + 1>(sums.data + 16, stride);
    if constexpr (kCount > 2) tiles.store<kSum + 2>(sums.data + 32, stride);
    if constexpr (kCount > 3) tiles.store<kSum + 3>(sums.data + 48, stride);
  }

  static std::size_t operand_bytes(std::size_t rows, std::size_t depth) {
    return num_tiles(rows, kRows) * kTileRows * depth * sizeof(Operand);
  }
  static void write(Operand* left, std::size_t stride, std::size_t row, std::size_t, std::size_t at, Lanes x) {
    store_bf16(x, left + row * stride + at);
  }
  static void multiply(Tiles& tiles, std::size_t rows, const Operand* left, std::size_t stride, const Columns& columns,
                       const Sums& sums) {
    multiply_in_tiles<Bf16Tiles>(tiles, rows, reinterpret_cast<const char*>(left), stride * sizeof(Operand), columns,
                                 sums);
  }

 private:
  template <int kNumber>
  static void begin_sum(Tiles& tiles, const Sums& sums) {
    if (sums.add) {
      tiles.load<kSum + kNumber>(sums.data + 16 * kNumber, sums.stride * sizeof(float));
    } else {
      tiles.zero<kSum + kNumber>();
    }
  }
};

// int8 by int8, the 16-bit left operand as 256 * high + low in two rows of a tile, 8 rows at a time: the tile has 16
// rows and a group seldom more than 8, so the second row is free.
struct Int8Tiles {
  using Element = int8_t;
  using Operand = int8_t;
  using State = Tiles;
  static constexpr std::size_t kRows = kTileRows / 2;
  static constexpr bool kHasScales = true;

  static std::size_t tile_rows(std::size_t rows) { return 2 * rows; }
  template <int kInto, int kA, int kB>
  static void add_product(Tiles& tiles) {
    tiles.add_int8_product<kInto, kA, kB>();
  }
  template <int kCount>
  static void begin_sums(Tiles& tiles, const Sums&) {
    tiles.zero<kSum>();
    if constexpr (kCount > 1) tiles.zero<kSum + 1>();
    if constexpr (kCount > 2) tiles.zero<kSum + 2>();
    if constexpr (kCount > 3) tiles.zero<kSum + 3>();
  }
  template <int kCount>
  static void end_sums(Tiles& tiles, const Sums& sums, std::size_t rows) {
    end_sum<0>(tiles, sums, rows);
    if constexpr (kCount > 1) end_sum<1>(tiles, sums, rows);
    if constexpr (kCount > 2) end_sum<2>(tiles, sums, rows);
    if constexpr (kCount > 3) end_sum<3>(tiles, sums, rows);
  }

  static std::size_t operand_bytes(std::size_t rows, std::size_t depth) {
    return num_tiles(rows, kRows) * kTileRows * depth * sizeof(Operand);
  }
  // In each tile the high bytes of its rows come first, then the low bytes.
  static void write(Operand* left, std::size_t stride, std::size_t row, std::size_t rows, std::size_t at, Lanes x) {
    int16_t whole[16];
    store_int16(x, whole);
    Operand* high = left + (row / kRows * kTileRows + row % kRows) * stride + at;
    Operand* low = high + rows_in_tile(rows) * stride;
    for (int i = 0; i < 16; ++i) {
      const int top = (whole[i] + 128) >> 8;
      high[i] = static_cast<int8_t>(top);
      low[i] = static_cast<int8_t>(whole[i] - top * 256);
    }
  }
  static void multiply(Tiles& tiles, std::size_t rows, const Operand* left, std::size_t stride, const Columns& columns,
                       const Sums& sums) {
    multiply_in_tiles<Int8Tiles>(tiles, rows, reinterpret_cast<const char*>(left), stride * sizeof(Operand), columns,
                                 sums);
  }

 private:
  // More rows than fit into a tile: all tiles are cut alike, the last one holds rows that nobody reads.
  static std::size_t rows_in_tile(std::size_t rows) { return rows < kRows ? rows : kRows; }

  // Exact in 32 bits: |256 * high + low| is at most 127 * 32512 a product.
  template <int kNumber>
  static void end_sum(Tiles& tiles, const Sums& sums, std::size_t rows) {
    alignas(64) int32_t sum[kTileRows][16];
    tiles.store<kSum + kNumber>(sum, sizeof sum[0]);
    for (std::size_t r = 0; r < rows; ++r) {
      const int32_t* high = sum[r];
      const int32_t* low = sum[r + tiles.shape().rows / 2];
      float* to = sums.data + r * sums.stride + 16 * kNumber;
      for (int i = 0; i < 16; ++i) {
        const float x = static_cast<float>(256 * high[i] + low[i]) * sums.factors[r];
        to[i] = sums.add ? to[i] + x : x;
      }
    }
  }
};

#endif

}  // namespace ambidex::AMBIDEX_ISA
