// Products with quantised matrices in AMX tiles, for many tokens; part of quant-inl.h.
//
// A tile's right operand is a run of 16 rows, 8 bits a number, four numbers side by side; its left one the run's 32
// numbers of 16 tokens, in two tiles, since q_x has 16 bits: q_x = 256 high + low, high signed, low not. The sums of both
// are whole numbers, and what follows is done in the order of add_record: a token's result is the same, bit by bit, as there.
#pragma once

#include "simd/tiles.h"

namespace ambidex::AMBIDEX_ISA {

#if defined(AMBIDEX_EMULATE_TILES) || defined(__AMX_BF16__)

// From so many tokens on tiles are faster than vectors (bench/ops/cpu_linear.py).
constexpr std::size_t kLeastTileTokens = 5;

#if defined(__AVX512F__)

// Four 8-bit numbers in each lane, the first of `even`'s pair, of odd's, the second of even's, of odd's.
inline void store_bytes(IntLanes even, IntLanes odd, char* to) {
  const __m512i low = _mm512_set1_epi32(0x00ff00ff);
  const __m512i above = _mm512_slli_epi16(odd.x, 8);
  _mm512_store_si512(to, _mm512_or_si512(_mm512_and_si512(even.x, low), above));
}

inline IntLanes times_256(IntLanes a) { return {_mm512_slli_epi32(a.x, 8)}; }

#else

inline void store_bytes(const IntLanes& even, const IntLanes& odd, char* to) {
  for (int i = 0; i < 16; ++i) {
    to[4 * i] = static_cast<char>(even.x[i]);
    to[4 * i + 1] = static_cast<char>(odd.x[i]);
    to[4 * i + 2] = static_cast<char>(even.x_high[i]);
    to[4 * i + 3] = static_cast<char>(odd.x_high[i]);
  }
}

inline IntLanes times_256(IntLanes a) {
  for (int32_t& x : a.x) x *= 256;
  return a;
}

#endif

// Runs that go through a stage together. Tiles are not loaded from stores that are still on their way to the cache, nor
// vectors from a tile's: a stage begins when the one before it is a few hundred instructions back.
constexpr std::size_t kTileRuns = 8;

struct RunTiles {
  alignas(64) char right[kTileRuns][8 * 64];
  alignas(64) int32_t high[kTileRuns][kTileRows * 16], low[kTileRuns][kTileRows * 16];
};

// First stage: a run's numbers as a right operand.
template <class Q>
inline void unpack_run(const char* record, std::size_t run, char* right) {
  const char* lines = record + Q::kRunsAt + run * Q::kRunBytes;
#pragma GCC unroll 8
  for (std::size_t i = 0; i < Q::kRunBytes; i += 64) prefetch(lines + kQuantAhead + i);
#pragma GCC unroll 8
  for (std::size_t line = 0; line < Q::kLines; ++line) {
    IntLanes parts[Q::kParts];
    Q::load(lines, line, parts);
#pragma GCC unroll 2
    for (std::size_t p = 0; p < Q::kParts; p += 2) {
      store_bytes(parts[p], parts[p + 1], right + (line * Q::kParts + p) / 2 * 64);
    }
  }
}

// Second stage: its products; `number` is the place of its first number, width that of a token in floats.
template <int kParity>
inline void multiply_run(Tiles& tiles, const char* right, const QuantToken& token, std::size_t number, std::size_t width,
                         int32_t* high, int32_t* low) {
  constexpr int kHigh = kSum + 2 * kParity, kLow = kHigh + 1;
  tiles.load<kRight + kParity>(right, 64);
  tiles.zero<kHigh>();
  tiles.load<kLeft>(token.high + number, width * sizeof(float));
  tiles.add_int8_product<kHigh, kLeft, kRight + kParity>();
  tiles.zero<kLow>();
  tiles.load<kLeft + 1>(token.low + number, width * sizeof(float));
  tiles.add_uint8_int8_product<kLow, kLeft + 1, kRight + kParity>();
  tiles.store<kHigh>(high, 64);
  tiles.store<kLow>(low, 64);
}

// Third stage: they are scaled and added to the totals.
template <class Q, std::size_t kTokens>
inline void finish_run(const int32_t* high, const int32_t* low, const char* record, std::size_t run,
                       const QuantToken& token, std::size_t number, std::size_t width, Lanes (&totals)[kTokens]) {
  const Lanes scale = Q::scale(record, run);
#pragma GCC unroll 16
  for (std::size_t t = 0; t < kTokens; ++t) {
    IntLanes sum = times_256(IntLanes::load(high + 16 * t)) + IntLanes::load(low + 16 * t);
    if (Q::kOffset != 0) {
      const int32_t* halves = token.integer_sums + t * width + number / 16;
      sum = sum + broadcast_int(-Q::kOffset * (Q::kNumbers == 16 ? halves[0] : halves[0] + halves[1]));
    }
    totals[t] = mul_add(to_lanes(sum), scale * Lanes::broadcast(token.scales[t * width + number / kBlock]), totals[t]);
  }
  if (Q::kHasMins) {
    const Lanes min = Q::min(record, run);
#pragma GCC unroll 16
    for (std::size_t t = 0; t < kTokens; ++t) {
      totals[t] = mul_add(min, Lanes::broadcast(token.sums[t * width + number / kBlock]), totals[t]);
    }
  }
}

// 16 rows times `num_tokens` of kTokens tokens; what the others give is thrown away.
template <class Q, std::size_t kTokens>
inline void multiply_tile_group(Tiles& tiles, RunTiles& runs, const LinearRange& range, std::size_t first_row,
                                std::size_t first_token, std::size_t num_tokens) {
  constexpr std::size_t kRecordBytes = kGroupRows * block_of(Q::kNumber).bytes;
  const std::size_t num_in = range.num_in, width = quant_token_width(num_in), num_runs = num_in / Q::kNumbers;
  const char* const records = static_cast<const char*>(range.weight) + first_row * row_bytes(Q::kNumber, num_in);
  const QuantToken token = token_of(range.x + first_token * width, num_in);
  Lanes totals[kTokens];
#pragma GCC unroll 16
  for (std::size_t t = 0; t < kTokens; ++t) totals[t] = Lanes::zero();
  const auto record_of = [&](std::size_t idx) { return records + idx / Q::kRuns * kRecordBytes; };
  for (std::size_t first = 0; first < num_runs; first += kTileRuns) {
    const std::size_t some = num_runs - first < kTileRuns ? num_runs - first : kTileRuns;
    for (std::size_t i = 0; i < some; ++i) unpack_run<Q>(record_of(first + i), (first + i) % Q::kRuns, runs.right[i]);
    for (std::size_t i = 0; i < some; ++i) {
      const std::size_t number = (first + i) * Q::kNumbers;
      if (i % 2 == 0) {
        multiply_run<0>(tiles, runs.right[i], token, number, width, runs.high[i], runs.low[i]);
      } else {
        multiply_run<1>(tiles, runs.right[i], token, number, width, runs.high[i], runs.low[i]);
      }
    }
    for (std::size_t i = 0; i < some; ++i) {
      finish_run<Q, kTokens>(runs.high[i], runs.low[i], record_of(first + i), (first + i) % Q::kRuns, token,
                             (first + i) * Q::kNumbers, width, totals);
    }
  }
  for (std::size_t t = 0; t < num_tokens; ++t) store_rows(range, first_row, first_token + t, totals[t]);
}

// All tokens that tiles are for; returns how many.
template <class Q>
std::size_t multiply_in_tiles(const LinearRange& range) {
  if (range.num_tokens < kLeastTileTokens) return 0;
  Tiles tiles;
  RunTiles runs{};
  std::size_t token = 0;
  while (range.num_tokens - token >= kLeastTileTokens) {
    const std::size_t some = range.num_tokens - token < kTileRows ? range.num_tokens - token : kTileRows;
    tiles.configure({some, Q::kNumbers / 4});
    for (std::size_t row = 0; row < range.num_rows; row += kGroupRows) {
      if (some <= kTileRows / 2) {
        multiply_tile_group<Q, kTileRows / 2>(tiles, runs, range, row, token, some);
      } else {
        multiply_tile_group<Q, kTileRows>(tiles, runs, range, row, token, some);
      }
    }
    token += some;
  }
  return token;
}

#else

template <class Q>
std::size_t multiply_in_tiles(const LinearRange&) {
  return 0;
}

#endif

}  // namespace ambidex::AMBIDEX_ISA
