// Body of score_rows.h, compiled once per instruction set (per_isa_scores.cpp).
#pragma once

#include "ops/score_rows.h"
#include "simd/sums.h"

namespace ambidex::AMBIDEX_ISA {

// Four rows and so many query heads at once: their sums stay in registers, of which AVX-512 has 32 and AVX2 16.
#if defined(__AVX512F__)
constexpr std::size_t kHeadsAtOnce = 4;
#else
constexpr std::size_t kHeadsAtOnce = 2;
#endif
constexpr std::size_t kRowsOfFour = 4;

// Rows whose scores are kept as fp32 until they are written in one go; all heads of the group read them from the nearest
// cache but the first.
constexpr std::size_t kBlockRows = 32;

// Fetched so far ahead: into the second cache, which has room for more fetches at once, what memory takes 0.5 us for at
// 15 GB/s a thread; into the first what the second takes.
constexpr std::size_t kScoreFarBytes = 8192, kScoreNearBytes = 1024;

// Numbers that one vector pair takes.
constexpr std::size_t kPair = 2 * Wide::kLanes;

template <class W>
inline void lay_out_pairs(const float* x, float* to) {
  memcpy(to, x, kPair * sizeof(float));
}
template <>
inline void lay_out_pairs<Bf16>(const float* x, float* to) {
  Wide halves[2];
  split_pairs(x, halves);
  halves[0].store(to);
  halves[1].store(to + Wide::kLanes);
}

template <class Q>
void lay_out_scored_of(Number number, const Q* q, std::size_t head_dim, float scale, float* to) {
  for (std::size_t k = 0; k < padded_to_step(head_dim); k += kPair) {
    float x[kPair];
    for (std::size_t i = 0; i < kPair; ++i) x[i] = k + i < head_dim ? to_float(q[k + i]) * scale : 0.0f;
    number == Number::kBf16 ? lay_out_pairs<Bf16>(x, to + k) : lay_out_pairs<float>(x, to + k);
  }
}

void lay_out_scored(Number number, Number q_number, const void* q, std::size_t head_dim, float scale, float* to) {
  switch (q_number) {
    case Number::kBf16:
      return lay_out_scored_of(number, static_cast<const Bf16*>(q), head_dim, scale, to);
    case Number::kFp16:
      return lay_out_scored_of(number, static_cast<const Fp16*>(q), head_dim, scale, to);
    default:
      return lay_out_scored_of(number, static_cast<const float*>(q), head_dim, scale, to);
  }
}

template <std::size_t kHeads, class W>
inline void add_pair(const W* row, const float* q, std::size_t stride, Wide (&sums)[kHeads][kRowsOfFour],
                     std::size_t place) {
  Wide halves[2];
  widen(row, halves);
  for (std::size_t head = 0; head < kHeads; ++head) {
    const float* const with = q + head * stride;
    sums[head][place] = mul_add(halves[0], Wide::load(with), sums[head][place]);
    sums[head][place] = mul_add(halves[1], Wide::load(with + Wide::kLanes), sums[head][place]);
  }
}

// The end of a row, less than a pair of vectors: what lies behind it may be no number.
template <std::size_t kHeads, class W>
inline void add_rest(const W* row, std::size_t num, const float* q, std::size_t stride,
                     Wide (&sums)[kHeads][kRowsOfFour], std::size_t place) {
  W rest[kPair] = {};
  memcpy(rest, row, num * sizeof(W));
  add_pair<kHeads>(rest, q, stride, sums, place);
}

// Scores of four rows for kHeads query heads, to[head * kBlockRows + row]. Rows may be one and the same.
template <std::size_t kHeads, class W>
inline void score_four(const W* const (&rows)[kRowsOfFour], std::size_t head_dim, const float* q, std::size_t stride,
                       float* to) {
  Wide sums[kHeads][kRowsOfFour];
  for (auto& of_head : sums) {
    for (Wide& sum : of_head) sum = Wide::zero();
  }
  std::size_t k = 0;
  for (; k + kPair <= head_dim; k += kPair) {
    for (std::size_t i = 0; i < kRowsOfFour; ++i) add_pair<kHeads>(rows[i] + k, q + k, stride, sums, i);
  }
  if (k < head_dim) {  // written out: a loop would keep all sums in memory
    add_rest<kHeads>(rows[0] + k, head_dim - k, q + k, stride, sums, 0);
    add_rest<kHeads>(rows[1] + k, head_dim - k, q + k, stride, sums, 1);
    add_rest<kHeads>(rows[2] + k, head_dim - k, q + k, stride, sums, 2);
    add_rest<kHeads>(rows[3] + k, head_dim - k, q + k, stride, sums, 3);
  }
  for (std::size_t head = 0; head < kHeads; ++head) store_sums(sums[head], to + head * kBlockRows);
}

template <std::size_t kHeads, class W>
inline void score_block(const W* rows, std::size_t num_rows, std::size_t head_dim, const float* q, std::size_t stride,
                        const char* end, float* to) {
  const char* const bytes = reinterpret_cast<const char*>(rows);
  const std::size_t four_bytes = kRowsOfFour * head_dim * sizeof(W);
  for (std::size_t i = 0; i < num_rows; i += kRowsOfFour) {
    const char* const far = bytes + i / kRowsOfFour * four_bytes + kScoreFarBytes;
    const char* const near = far - kScoreFarBytes + kScoreNearBytes;
    if (far + four_bytes <= end) {
      for (std::size_t b = 0; b < four_bytes; b += 64) prefetch_to_l2(far + b);
    }
    if (near + four_bytes <= end) {
      for (std::size_t b = 0; b < four_bytes; b += 64) prefetch(near + b);
    }
    const std::size_t last = num_rows - 1;
    const W* const four[kRowsOfFour] = {rows + i * head_dim, rows + (i + 1 < last ? i + 1 : last) * head_dim,
                                        rows + (i + 2 < last ? i + 2 : last) * head_dim,
                                        rows + (i + 3 < last ? i + 3 : last) * head_dim};
    score_four<kHeads>(four, head_dim, q, stride, to + i);
  }
}

// `end`: of what is fetched ahead.
template <class W>
inline void score_block_of(std::size_t num_heads, const W* rows, std::size_t num_rows, std::size_t head_dim,
                           const float* q, std::size_t stride, const char* end, float* to) {
  switch (num_heads) {
    case 1:
      return score_block<1>(rows, num_rows, head_dim, q, stride, end, to);
    case 2:
      return score_block<2>(rows, num_rows, head_dim, q, stride, end, to);
#if defined(__AVX512F__)
    case 3:
      return score_block<3>(rows, num_rows, head_dim, q, stride, end, to);
    case 4:
      return score_block<4>(rows, num_rows, head_dim, q, stride, end, to);
#endif
  }
}

inline void store_scores(const float* x, std::size_t num, Number number, char* to) {
  std::size_t i = 0;
  switch (number) {
    case Number::kBf16:
      for (; i + 16 <= num; i += 16) store_bf16(Lanes::load(x + i), reinterpret_cast<Bf16*>(to) + i);
      for (; i < num; ++i) {
        const Bf16 y = to_bf16(x[i]);
        memcpy(to + 2 * i, &y, sizeof y);
      }
      return;
    case Number::kFp16:
      for (; i < num; ++i) {
        const Fp16 y = to_fp16(x[i]);
        memcpy(to + 2 * i, &y, sizeof y);
      }
      return;
    default:
      memcpy(to, x, num * sizeof(float));
  }
}

template <class W>
void score_range_of(const ScoreRange& range) {
  const W* const rows = reinterpret_cast<const W*>(range.rows);
  const std::size_t head_dim = range.head_dim, stride = padded_to_step(head_dim);
  const char* const end = range.rows + range.num_rows * head_dim * sizeof(W);
  for (std::size_t b = 0; b < kScoreFarBytes && range.rows + b < end; b += 64) prefetch_to_l2(range.rows + b);
  // Heads in as many parts as they need, as even as can be.
  const std::size_t num_parts = (range.group_size + kHeadsAtOnce - 1) / kHeadsAtOnce;
  for (std::size_t begin = 0; begin < range.num_rows; begin += kBlockRows) {
    const std::size_t num = range.num_rows - begin < kBlockRows ? range.num_rows - begin : kBlockRows;
    const W* const block = rows + begin * head_dim;
    for (std::size_t part = 0; part < num_parts; ++part) {
      const std::size_t head = part * range.group_size / num_parts;
      const std::size_t num_heads = (part + 1) * range.group_size / num_parts - head;
      float scores[kHeadsAtOnce * kBlockRows];
      const char* const fetched = part == 0 ? end : range.rows;  // later parts find the rows near
      score_block_of(num_heads, block, num, head_dim, range.q + head * stride, stride, fetched, scores);
      for (std::size_t i = 0; i < num_heads; ++i) {
        store_scores(scores + i * kBlockRows, num, range.scores_number,
                     range.scores + (head + i) * range.scores_stride + begin * size_of(range.scores_number));
      }
    }
  }
}

void score_range(const ScoreRange& range) {
  switch (range.number) {
    case Number::kBf16:
      return score_range_of<Bf16>(range);
    case Number::kFp16:
      return score_range_of<Fp16>(range);
    default:
      return score_range_of<float>(range);
  }
}

}  // namespace ambidex::AMBIDEX_ISA
