// Products with 4-bit weights in AMX tiles, compiled once per instruction set; without tiles they are not there.
//
//   y[t, n] = sum over runs j of  d[n, j] Σ x[t, k] (16 + q[n, k])  +  (m[n, j] - (16 + o) d[n, j]) Σ x[t, k],  k in run j
//
// for weights d (q - o) + m. A tile's right operand is a run of a group's 16 rows as bf16: 16 + q, for q in 0 … 15, is q
// in the four bits below the exponent of 16. So a shift and one operation make it, and a line of 8 integers of 16 rows
// gives four lines of pairs in the order in which they lie (quant.h). The left operand is the run's 32 numbers of 16
// tokens. Sums of a run are stored, scaled in vectors and added to the totals: scales differ from run to run.
//
// Numbers of x are bf16, or two of them: x = high + low, off by at most 2^-16 of it. Products are exact, sums fp32; what
// 16 adds to them is taken off again, which costs them three of their 24 bits. No sum crosses rows or tokens, so a
// token's result does not depend on those beside it.
//
// Tiles are not loaded from stores that are still on their way to the cache, nor vectors from a tile's. So a panel of 8
// runs goes through three stages (unpack, multiply, scale), each of which begins hundreds of instructions behind what it
// reads. Panels of x come first, groups of rows inside: what a panel takes of x (8 or 16 KiB), of unpacked weights and
// of sums (8 KiB each) stays in the first cache while the groups pass.
//
// Cycles of a core for a run of 16 rows (288 bytes of Q4_0) and 8 or 16 tokens of one term, from counts of instructions:
// 32 shifts and operations and 16 or 32 additions on two ports, 26 or 34 stores, 44 or 68 loads on two ports, 16 of the
// tile unit: some 30 or 40, which at 2.5 GHz is 24 or 18 GB/s of weights; eight such cores read DRAM at 15 each.
#pragma once

#include <string.h>

#include "ops/linear.h"
#include "ops/quant_types-inl.h"
#include "simd/tiles.h"

namespace ambidex::AMBIDEX_ISA {

#if defined(AMBIDEX_EMULATE_TILES) || defined(__AMX_BF16__)

bool has_quant_tiles(Number number) {
  return number == Number::kQ4_0 || number == Number::kQ4_1 || number == Number::kQ4_K;
}

constexpr std::size_t kRunNumbers = 32;
constexpr std::size_t kRunTileBytes = kTileTokens * kRunNumbers * sizeof(Bf16);
static_assert(kQuantTermBytes == kQuantPieceRuns * kRunTileBytes, "a term is the left operands of its runs");

// x of up to 16 tokens in a piece: its terms, then for each run the sums of the tokens.
void pack_quant_tile_piece(const float* x, std::size_t num_tokens, std::size_t num_in, std::size_t piece,
                           char* packed, uint8_t* num_terms) {
  const std::size_t begin = piece * kQuantPieceNumbers;
  const std::size_t end = begin + kQuantPieceNumbers < num_in ? begin + kQuantPieceNumbers : num_in;
  uint32_t any = 0;
  for (std::size_t t = 0; t < num_tokens; ++t) {
    for (std::size_t k = begin; k < end; ++k) any |= float_to_bits(x[t * num_in + k]);
  }
  const std::size_t terms = (any & 0xffffu) == 0 ? 1 : kQuantTerms;
  *num_terms = static_cast<uint8_t>(terms);
  auto* const sums = reinterpret_cast<float*>(packed + kQuantTerms * kQuantTermBytes);
  for (std::size_t t = 0; t < num_tokens; ++t) {
    for (std::size_t k = begin; k < end; k += kRunNumbers) {
      const std::size_t run = (k - begin) / kRunNumbers;
      auto* const to = reinterpret_cast<Bf16*>(packed + run * kRunTileBytes) + t * kRunNumbers;
      Lanes sum = Lanes::zero();
      for (std::size_t half = 0; half < kRunNumbers; half += 16) {
        const float* const from = x + t * num_in + k + half;
        const Lanes whole = Lanes::load(from);
        Bf16* const high = to + half;
        store_bf16(whole, high);
        if (terms == 1) {
          sum = sum + whole;
          continue;
        }
        float rest[16], kept[16];
        for (std::size_t i = 0; i < 16; ++i) rest[i] = from[i] - to_float(high[i]);
        auto* const low = reinterpret_cast<Bf16*>(reinterpret_cast<char*>(high) + kQuantTermBytes);
        store_bf16(Lanes::load(rest), low);
        for (std::size_t i = 0; i < 16; ++i) kept[i] = to_float(high[i]) + to_float(low[i]);
        sum = sum + Lanes::load(kept);
      }
      sums[run * kTileTokens + t] = sum_of(sum);
    }
  }
}

// Where a panel's weights go between the stages.
struct QuantStages {
  alignas(64) char right[kQuantPieceRuns][kTileLines * kTileBytes];
  alignas(64) float sums[kQuantPieceRuns][kTileTokens * kTileRows];
};

// Weights of a panel of a group, and those of the panel whose lines are fetched meanwhile, or null.
struct QuantPanel {
  const char* records;
  const char* ahead;
  std::size_t num_runs;
};

// First stage.
template <class Q>
inline void unpack_panel(const QuantPanel& panel, QuantStages& stages) {
  constexpr std::size_t kRecordBytes = kGroupRows * block_of(Q::kNumber).bytes;
  constexpr std::size_t kShare = kRecordBytes / Q::kRuns;  // of a run, if scales are shared out
  for (std::size_t i = 0; i < panel.num_runs; ++i) {
    if (panel.ahead != nullptr) {
#pragma GCC unroll 8
      for (std::size_t at = 0; at < kShare; at += 64) prefetch_to_l2(panel.ahead + i * kShare + at);
    }
    const char* const record = panel.records + i / Q::kRuns * kRecordBytes;
    const char* const lines = record + Q::kRunsAt + i % Q::kRuns * Q::kRunBytes;
#pragma GCC unroll 4
    for (std::size_t line = 0; line < Q::kLines; ++line) {
      store_nibbles_from_16(lines + kTileBytes * line, stages.right[i] + 4 * kTileBytes * line);
    }
  }
}

template <int kTurn>
inline void multiply_run(Tiles& tiles, const char* left, std::size_t terms, const char* right, float* sums) {
  constexpr int kLeftTile = kLeft + kTurn % 2, kRightTile = kRight + kTurn % 2, kSumTile = kSum + kTurn;
  tiles.load<kRightTile>(right, kTileBytes);
  tiles.load<kLeftTile>(left, kTileBytes);
  tiles.zero<kSumTile>();
  tiles.add_bf16_product<kSumTile, kLeftTile, kRightTile>();
  if (terms > 1) {
    tiles.load<kLeftTile>(left + kQuantTermBytes, kTileBytes);
    tiles.add_bf16_product<kSumTile, kLeftTile, kRightTile>();
  }
  tiles.store<kSumTile>(sums, kTileBytes);
}

// Second stage: the sums of each run, [tokens][16 rows].
inline void multiply_panel(Tiles& tiles, const char* x, std::size_t terms, std::size_t num_runs, QuantStages& stages) {
  for (std::size_t i = 0; i < num_runs; ++i, x += kRunTileBytes) {
    switch (i % 4) {
      case 0:
        multiply_run<0>(tiles, x, terms, stages.right[i], stages.sums[i]);
        break;
      case 1:
        multiply_run<1>(tiles, x, terms, stages.right[i], stages.sums[i]);
        break;
      case 2:
        multiply_run<2>(tiles, x, terms, stages.right[i], stages.sums[i]);
        break;
      default:
        multiply_run<3>(tiles, x, terms, stages.right[i], stages.sums[i]);
    }
  }
}

// Third stage: they are scaled and added to the totals of kTokens tokens; what more than there are give is nobody's.
template <class Q, std::size_t kTokens>
inline void scale_panel(const QuantPanel& panel, const float* x_sums, const QuantStages& stages, float* totals) {
  constexpr std::size_t kRecordBytes = kGroupRows * block_of(Q::kNumber).bytes;
  Lanes total[kTokens];
#pragma GCC unroll 16
  for (std::size_t t = 0; t < kTokens; ++t) total[t] = Lanes::load(totals + t * kTileRows);
  for (std::size_t i = 0; i < panel.num_runs; ++i) {
    const char* const record = panel.records + i / Q::kRuns * kRecordBytes;
    const Lanes scale = Q::scale(record, i % Q::kRuns);
    const Lanes offset = scale * Lanes::broadcast(-16.0f - static_cast<float>(Q::kOffset));
    const Lanes shift = Q::kHasMins ? offset + Q::min(record, i % Q::kRuns) : offset;
#pragma GCC unroll 16
    for (std::size_t t = 0; t < kTokens; ++t) {
      total[t] = mul_add(Lanes::load(stages.sums[i] + t * kTileRows), scale, total[t]);
      total[t] = mul_add(Lanes::broadcast(x_sums[i * kTileTokens + t]), shift, total[t]);
    }
  }
#pragma GCC unroll 16
  for (std::size_t t = 0; t < kTokens; ++t) total[t].store(totals + t * kTileRows);
}

template <class Q>
inline void scale_tokens(std::size_t num_tokens, const QuantPanel& panel, const float* x_sums, const QuantStages& stages,
                         float* totals) {
  if (num_tokens <= 4) {
    scale_panel<Q, 4>(panel, x_sums, stages, totals);
  } else if (num_tokens <= 8) {
    scale_panel<Q, 8>(panel, x_sums, stages, totals);
  } else {
    scale_panel<Q, 16>(panel, x_sums, stages, totals);
  }
}

// Blocks of tokens whose totals are kept while the panels pass.
constexpr std::size_t kQuantBlocks = 8;

template <class Q>
void multiply_quant_tile_range_of(const LinearRange& range) {
  constexpr std::size_t kTotals = kTileTokens * kTileRows;
  alignas(64) float totals[kQuantBlocks][kMostTileRows / kTileRows][kTotals];
  QuantStages stages;
  memset(&stages, 0, sizeof stages);  // rows of tokens that are not there are read, too
  Tiles tiles;
  const std::size_t num_runs = range.num_in / kRunNumbers, num_pieces = tile_pieces(range.number, range.num_in);
  const std::size_t num_groups = (range.num_rows + kTileRows - 1) / kTileRows, num_panels = num_pieces * num_groups;
  const std::size_t group_bytes = kGroupRows * row_bytes(Q::kNumber, range.num_in);
  const char* const weights = static_cast<const char*>(range.weight);
  constexpr std::size_t kPieceWeights = kQuantPieceRuns / Q::kRuns * kGroupRows * block_of(Q::kNumber).bytes;
  static_assert(kQuantPieceRuns % Q::kRuns == 0, "a piece holds whole records");
  const auto weights_of = [&](std::size_t panel) {  // panels in the order in which they pass
    return weights + panel % num_groups * group_bytes + panel / num_groups * kPieceWeights;
  };
  const std::size_t num_blocks = tile_blocks(range.num_tokens);
  for (std::size_t first = 0; first < num_blocks; first += kQuantBlocks) {
    const std::size_t some = num_blocks - first < kQuantBlocks ? num_blocks - first : kQuantBlocks;
    const std::size_t token = first * kTileTokens;
    const std::size_t tokens = range.num_tokens - token < kTileTokens ? range.num_tokens - token : kTileTokens;
    tiles.configure({tokens, kTileLines});
    memset(totals, 0, some * sizeof totals[0]);
    for (std::size_t idx = 0; idx < num_panels; ++idx) {
      const std::size_t piece = idx / num_groups, run = piece * kQuantPieceRuns;
      const std::size_t left = num_runs - run < kQuantPieceRuns ? num_runs - run : kQuantPieceRuns;
      const QuantPanel panel{weights_of(idx), idx + 2 < num_panels ? weights_of(idx + 2) : nullptr, left};
      unpack_panel<Q>(panel, stages);
      for (std::size_t block = 0; block < some; ++block) {
        const std::size_t at = (first + block) * num_pieces + piece;
        const char* const x = range.tiles.data + at * kQuantPieceBytes;
        multiply_panel(tiles, x, range.tiles.terms[at], left, stages);
        scale_tokens<Q>(tokens, panel, reinterpret_cast<const float*>(x + kQuantTerms * kQuantTermBytes), stages,
                        totals[block][idx % num_groups]);
      }
    }
    for (std::size_t group = 0; group < num_groups; ++group) {
      const std::size_t row = group * kTileRows;
      const std::size_t rows = range.num_rows - row < kTileRows ? range.num_rows - row : kTileRows;
      for (std::size_t t = token; t < range.num_tokens && t < token + some * kTileTokens; ++t) {
        const float* const total = totals[(t - token) / kTileTokens][group] + (t - token) % kTileTokens * kTileRows;
        const std::size_t at = t * range.y_stride + row;
        for (std::size_t r = 0; r < rows; ++r) {
          float y = total[r];
          if (range.bias != nullptr) y += range.bias[row + r];
          if (range.residual != nullptr) y += range.residual[at + r];
          range.y[at + r] = y;
        }
      }
    }
  }
}

void multiply_quant_tile_range(const LinearRange& range) {
  switch (range.number) {
    case Number::kQ4_0:
      return multiply_quant_tile_range_of<Q4_0>(range);
    case Number::kQ4_1:
      return multiply_quant_tile_range_of<Q4_1>(range);
    case Number::kQ4_K:
      return multiply_quant_tile_range_of<Q4_K>(range);
    default:
      return;
  }
}

#else

bool has_quant_tiles(Number) { return false; }
void pack_quant_tile_piece(const float*, std::size_t, std::size_t, std::size_t, char*, uint8_t*) {}
void multiply_quant_tile_range(const LinearRange&) {}

#endif

}  // namespace ambidex::AMBIDEX_ISA
