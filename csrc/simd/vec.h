// The few vector operations that the ops use, over fp32 lanes of the instruction set this file is compiled for.
//
// NOTE: AMBIDEX_ISA (CMakeLists.txt) names the namespace. Code compiled with different flags must never share a
// symbol: the linker would keep one copy, and an older processor would meet the newer one's instructions. For the
// same reason an op's body calls C functions (expf), never inline ones of the standard library (std::exp).
#pragma once

#include <cstddef>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ambidex::AMBIDEX_ISA {

#if defined(__AVX512F__)

struct Vec {
  static constexpr std::size_t kLanes = 16;
  __m512 lanes;

  static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, lanes); }

  // The first n < kLanes lanes; the memory behind them is not touched.
  static Vec load_first(std::size_t n, const float* p) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
  void store_first(std::size_t n, float* p) const { _mm512_mask_storeu_ps(p, first(n), lanes); }

 private:
  static __mmask16 first(std::size_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
};

inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }  // a * b + c

#elif defined(__AVX2__)

struct Vec {
  static constexpr std::size_t kLanes = 8;
  __m256 lanes;

  static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  void store(float* p) const { _mm256_storeu_ps(p, lanes); }

  // The first n < kLanes lanes; the memory behind them is not touched.
  static Vec load_first(std::size_t n, const float* p) { return {_mm256_maskload_ps(p, first(n))}; }
  void store_first(std::size_t n, float* p) const { _mm256_maskstore_ps(p, first(n), lanes); }

 private:
  static __m256i first(std::size_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
  }
};

inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lanes, b.lanes)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }  // a * b + c

#else

// One lane: the compiler vectorises the loop over it with what every processor of the family has (SSE2, NEON).
struct Vec {
  static constexpr std::size_t kLanes = 1;
  float lanes;

  static Vec broadcast(float x) { return {x}; }
  static Vec load(const float* p) { return {*p}; }
  void store(float* p) const { *p = lanes; }

  static Vec load_first(std::size_t, const float*) { return {0.0f}; }  // n < 1: no lane
  void store_first(std::size_t, float*) const {}
};

inline Vec operator*(Vec a, Vec b) { return {a.lanes * b.lanes}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {a.lanes * b.lanes + c.lanes}; }  // a * b + c

#endif

}  // namespace ambidex::AMBIDEX_ISA
