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

// Two runs are under way at a time, so that one is scaled while the tiles of the next are multiplied.
struct RunTiles {
  alignas(64) char right[2][8 * 64];
  alignas(64) int32_t high[2][kTileRows * 16], low[2][kTileRows * 16];
};

// Multiplies a run: `number` is the place of its first number, width that of a token in floats.
template <class Q, int kParity>
inline void start_run(Tiles& tiles, RunTiles& runs, const char* record, std::size_t run, const QuantToken& token,
                      std::size_t number, std::size_t width) {
  const char* lines = record + Q::kRunsAt + run * Q::kRunBytes;
#pragma GCC unroll 8
  for (std::size_t i = 0; i < Q::kRunBytes; i += 64) prefetch(lines + kQuantAhead + i);
#pragma GCC unroll 8
  for (std::size_t line = 0; line < Q::kLines; ++line) {
    IntLanes parts[Q::kParts];
    Q::load(lines, line, parts);
#pragma GCC unroll 2
    for (std::size_t p = 0; p < Q::kParts; p += 2) {
      store_bytes(parts[p], parts[p + 1], runs.right[kParity] + (line * Q::kParts + p) / 2 * 64);
    }
  }
  constexpr int kHigh = kSum + 2 * kParity, kLow = kHigh + 1;
  tiles.load<kRight + kParity>(runs.right[kParity], 64);
  tiles.zero<kHigh>();
  tiles.load<kLeft>(token.high + number, width * sizeof(float));
  tiles.add_int8_product<kHigh, kLeft, kRight + kParity>();
  tiles.store<kHigh>(runs.high[kParity], 64);
  tiles.zero<kLow>();
  tiles.load<kLeft + 1>(token.low + number, width * sizeof(float));
  tiles.add_uint8_int8_product<kLow, kLeft + 1, kRight + kParity>();
  tiles.store<kLow>(runs.low[kParity], 64);
}

// Scales it and adds it to the totals.
template <class Q, std::size_t kTokens, int kParity>
inline void finish_run(const RunTiles& runs, const char* record, std::size_t run, const QuantToken& token,
                       std::size_t number, std::size_t width, Lanes (&totals)[kTokens]) {
  const Lanes scale = Q::scale(record, run);
#pragma GCC unroll 16
  for (std::size_t t = 0; t < kTokens; ++t) {
    IntLanes sum = times_256(IntLanes::load(runs.high[kParity] + 16 * t)) + IntLanes::load(runs.low[kParity] + 16 * t);
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
  const auto start = [&](std::size_t idx) {
    const char* record = record_of(idx);
    if (idx % 2 == 0) {
      start_run<Q, 0>(tiles, runs, record, idx % Q::kRuns, token, idx * Q::kNumbers, width);
    } else {
      start_run<Q, 1>(tiles, runs, record, idx % Q::kRuns, token, idx * Q::kNumbers, width);
    }
  };
  start(0);
  for (std::size_t idx = 0; idx < num_runs; ++idx) {
    if (idx + 1 < num_runs) start(idx + 1);
    if (idx % 2 == 0) {
      finish_run<Q, kTokens, 0>(runs, record_of(idx), idx % Q::kRuns, token, idx * Q::kNumbers, width, totals);
    } else {
      finish_run<Q, kTokens, 1>(runs, record_of(idx), idx % Q::kRuns, token, idx * Q::kNumbers, width, totals);
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
