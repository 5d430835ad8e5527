// Sums over the lanes of four vectors at once: a shuffle and a half a vector less than one after the other.
// The same rules as in vec.h: nothing here has a name outside AMBIDEX_ISA.
#pragma once

#include "simd/dot.h"

namespace ambidex::AMBIDEX_ISA {

// to[i] = the sum of the lanes of vectors[i].
#if defined(__AVX512F__)

inline void store_sums(const Wide (&vectors)[4], float* to) {
  const auto [a, b, c, d] = vectors;
  // In each quarter: a0 + a2, b0 + b2, a1 + a3, b1 + b3; the same of c and d; then the whole of each.
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.x, b.x), _mm512_unpackhi_ps(a.x, b.x));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.x, d.x), _mm512_unpackhi_ps(c.x, d.x));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 eighths = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(eighths), _mm256_extractf128_ps(eighths, 1)));
}

#elif defined(__AVX2__)

inline void store_sums(const Wide (&vectors)[4], float* to) {
  const auto [a, b, c, d] = vectors;
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a.x, b.x), _mm256_unpackhi_ps(a.x, b.x));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c.x, d.x), _mm256_unpackhi_ps(c.x, d.x));
  const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256 halves = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

#else

inline void store_sums(const Wide (&vectors)[4], float* to) {
  for (int i = 0; i < 4; ++i) to[i] = sum_of(vectors[i]);
}

#endif

}  // namespace ambidex::AMBIDEX_ISA
