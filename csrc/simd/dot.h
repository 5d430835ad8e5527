// Vectors along the rows of a matrix: two of them are widened at a time from 2 * kLanes stored numbers.
//
// The two halves of a bf16 vector are its even and its odd numbers, since 32-bit lanes split that way without a shuffle;
// those of fp32 and fp16 are the first and the second kLanes. What they are multiplied with is laid out likewise
// (ops/linear-inl.h, pack_tokens). The same rules as in vec.h: nothing here has a name outside AMBIDEX_ISA.
#pragma once

#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

#if defined(__AVX512F__)

struct Wide {
  static constexpr std::size_t kLanes = 16;
  __m512 x;

  static Wide zero() { return {_mm512_setzero_ps()}; }
  static Wide load(const float* p) { return {_mm512_loadu_ps(p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
};

inline Wide mul_add(Wide a, Wide b, Wide c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }  // a * b + c
inline float sum_of(Wide a) { return _mm512_reduce_add_ps(a.x); }

// The even and the odd numbers of 2 * kLanes.
inline void split_pairs(const float* p, Wide (&halves)[2]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 first = _mm512_loadu_ps(p), second = _mm512_loadu_ps(p + 16);
  halves[0] = {_mm512_permutex2var_ps(first, even, second)};
  halves[1] = {_mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second)};
}

inline void widen(const float* p, Wide (&halves)[2]) {
  halves[0] = Wide::load(p);
  halves[1] = Wide::load(p + 16);
}
inline void widen(const Bf16* p, Wide (&halves)[2]) {
  const __m512i pairs = _mm512_loadu_si512(p);
  halves[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  halves[1] = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline void widen(const Fp16* p, Wide (&halves)[2]) {
  halves[0] = {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  halves[1] = {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16)))};
}

#elif defined(__AVX2__)

struct Wide {
  static constexpr std::size_t kLanes = 8;
  __m256 x;

  static Wide zero() { return {_mm256_setzero_ps()}; }
  static Wide load(const float* p) { return {_mm256_loadu_ps(p)}; }
  void store(float* p) const { _mm256_storeu_ps(p, x); }
};

inline Wide mul_add(Wide a, Wide b, Wide c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }  // a * b + c
inline float sum_of(Wide a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.x), _mm256_extractf128_ps(a.x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The even and the odd numbers of 2 * kLanes.
inline void split_pairs(const float* p, Wide (&halves)[2]) {
  const __m256 first = _mm256_loadu_ps(p), second = _mm256_loadu_ps(p + 8);
  const __m256 low = _mm256_permute2f128_ps(first, second, 0x20), high = _mm256_permute2f128_ps(first, second, 0x31);
  // Each half of low and high: numbers 0 to 3 and 4 to 7 of first, then of second.
  halves[0] = {_mm256_shuffle_ps(low, high, 0x88)};
  halves[1] = {_mm256_shuffle_ps(low, high, 0xdd)};
}

inline void widen(const float* p, Wide (&halves)[2]) {
  halves[0] = Wide::load(p);
  halves[1] = Wide::load(p + 8);
}
inline void widen(const Bf16* p, Wide (&halves)[2]) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  halves[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
  halves[1] = {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline void widen(const Fp16* p, Wide (&halves)[2]) {
  halves[0] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  halves[1] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

#else

// Plain loops, which the compiler vectorises with what every processor of the family has (SSE2, NEON).
struct Wide {
  static constexpr std::size_t kLanes = 8;
  float x[8];

  static Wide zero() { return {}; }
  static Wide load(const float* p) {
    Wide a;
    memcpy(a.x, p, sizeof a.x);
    return a;
  }
  void store(float* p) const { memcpy(p, x, sizeof x); }
};

inline Wide mul_add(Wide a, Wide b, Wide c) {  // a * b + c
  for (int i = 0; i < 8; ++i) a.x[i] = a.x[i] * b.x[i] + c.x[i];
  return a;
}
inline float sum_of(Wide a) {
  for (int half = 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.x[i] += a.x[i + half];
  }
  return a.x[0];
}

// The even and the odd numbers of 2 * kLanes.
inline void split_pairs(const float* p, Wide (&halves)[2]) {
  for (int i = 0; i < 8; ++i) halves[0].x[i] = p[2 * i];
  for (int i = 0; i < 8; ++i) halves[1].x[i] = p[2 * i + 1];
}

inline void widen(const float* p, Wide (&halves)[2]) {
  halves[0] = Wide::load(p);
  halves[1] = Wide::load(p + 8);
}
inline void widen(const Bf16* p, Wide (&halves)[2]) {
  for (int i = 0; i < 8; ++i) halves[0].x[i] = to_float(p[2 * i]);
  for (int i = 0; i < 8; ++i) halves[1].x[i] = to_float(p[2 * i + 1]);
}
inline void widen(const Fp16* p, Wide (&halves)[2]) {
  for (int i = 0; i < 8; ++i) halves[0].x[i] = to_float(p[i]);
  for (int i = 0; i < 8; ++i) halves[1].x[i] = to_float(p[8 + i]);
}

#endif

}  // namespace ambidex::AMBIDEX_ISA
