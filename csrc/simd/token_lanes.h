// Single tokens of tiles and of rows, widened to fp32 lanes. The same rules as in vec.h: nothing here has a name outside
// AMBIDEX_ISA.
#pragma once

#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

// load_token: one token of a line of V in tile order, 16 dims, of which each has four tokens side by side.
#if defined(__AVX512F__)

inline Lanes load_token(const int8_t* line, std::size_t token) {
  const __m128i shift = _mm_cvtsi32_si128(24 - 8 * static_cast<int>(token));
  const __m512i high = _mm512_sll_epi32(_mm512_loadu_si512(line), shift);
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24))};
}

// 16 numbers that lie one behind the other.
inline Lanes load_some(const float* p) { return Lanes::load(p); }
inline Lanes load_some(const Bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Lanes load_some(const Fp16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// Bit i: lane i is not less than `least`; also where it is NaN.
inline uint32_t not_less(Lanes a, float least) {
  return _mm512_cmp_ps_mask(a.x, _mm512_set1_ps(least), _CMP_NLT_UQ);
}

// sums[i] = the sum of the lanes of a[i].
inline void sum_each(const Lanes (&a)[4], float (&sums)[4]) {
  const __m512 two = _mm512_add_ps(_mm512_unpacklo_ps(a[0].x, a[1].x), _mm512_unpackhi_ps(a[0].x, a[1].x));
  const __m512 other = _mm512_add_ps(_mm512_unpacklo_ps(a[2].x, a[3].x), _mm512_unpackhi_ps(a[2].x, a[3].x));
  const __m512 four = _mm512_add_ps(_mm512_shuffle_ps(two, other, 0x44), _mm512_shuffle_ps(two, other, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__)

inline void sum_each(const Lanes (&a)[4], float (&sums)[4]) {
  __m256 halves[4];
  for (int i = 0; i < 4; ++i) halves[i] = _mm256_add_ps(a[i].low, a[i].high);
  const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}

inline Lanes load_token(const int8_t* line, std::size_t token) {
  const __m128i shift = _mm_cvtsi32_si128(24 - 8 * static_cast<int>(token));
  const __m256i low = _mm256_sll_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)), shift);
  const __m256i high = _mm256_sll_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32)), shift);
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(low, 24)), _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 24))};
}

inline __m128i load_eight(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// 16 numbers that lie one behind the other.
inline Lanes load_some(const float* p) { return Lanes::load(p); }
inline Lanes load_some(const Bf16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_eight(p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_eight(p + 8)), 16))};
}
inline Lanes load_some(const Fp16* p) {
  return {_mm256_cvtph_ps(load_eight(p)), _mm256_cvtph_ps(load_eight(p + 8))};
}

// Bit i: lane i is not less than `least`; also where it is NaN.
inline uint32_t not_less(Lanes a, float least) {
  const __m256 limit = _mm256_set1_ps(least);
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, limit, _CMP_NLT_UQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, limit, _CMP_NLT_UQ));
  return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 8;
}

#else

inline void sum_each(const Lanes (&a)[4], float (&sums)[4]) {
  for (int i = 0; i < 4; ++i) sums[i] = sum_of(a[i]);
}

inline Lanes load_token(const int8_t* line, std::size_t token) {
  Lanes lanes;
  for (int i = 0; i < 16; ++i) lanes.x[i] = line[4 * i + static_cast<int>(token)];
  return lanes;
}

// 16 numbers that lie one behind the other.
template <class Element>
inline Lanes load_some(const Element* p) {
  Lanes lanes;
  for (int i = 0; i < 16; ++i) lanes.x[i] = to_float(p[i]);
  return lanes;
}

// Bit i: lane i is not less than `least`; also where it is NaN.
inline uint32_t not_less(Lanes a, float least) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(!(a.x[i] < least)) << i;
  return bits;
}

#endif

}  // namespace ambidex::AMBIDEX_ISA
