// 16 fp32 lanes and 16 int32 lanes of the instruction set this file is compiled for: one 64-byte line of a tile
// (docs/kv_layout.md, "Tile order"). The same rules as in vec.h: nothing here has a name outside AMBIDEX_ISA.
#pragma once

#include <stdint.h>
#include <string.h>

#include <cstddef>

#if defined(__x86_64__) && !defined(AMBIDEX_INTRINSICS_GIVEN)
#include <immintrin.h>
#endif

namespace ambidex::AMBIDEX_ISA {

inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Elements of a pool that C++17 has no type for.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }

// The exponent is moved by a multiplication, which is right for subnormal numbers, too.
inline float to_float(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinite or NaN
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}

// To nearest, ties to even; NaN stays NaN.
inline Bf16 to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// The same; beyond 65504 infinite.
inline Fp16 to_fp16(float x) {
#if defined(__F16C__)
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x3ffu))};  // NaN
  if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (rest < 0x38800000u) {  // subnormal: the addition of 0.5 rounds at 2^-24
    const float rounded = bits_to_float(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_to_bits(rounded) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13))};
#endif
}

// NOTE: written out, since GCC 12 and 13 drop calls of a function that does nothing but __builtin_prefetch: they take it for
// one without effect.
#if defined(__x86_64__)
inline void prefetch(const char* p) { asm volatile("prefetcht0 %0" ::"m"(*p)); }
inline void prefetch_to_l2(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }
#else
inline void prefetch(const char* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_to_l2(const char* p) { __builtin_prefetch(p, 0, 2); }
#endif
// A line that is about to be written: else a store waits for it, and those behind it do.
#if defined(__x86_64__) && defined(__AVX2__)
inline void prefetch_to_write(char* p) { asm volatile("prefetchw %0" ::"m"(*p)); }
#else
inline void prefetch_to_write(char* p) { __builtin_prefetch(p, 1, 3); }
#endif

#if defined(__AVX512F__)

struct Lanes {
  __m512 x;

  static Lanes zero() { return {_mm512_setzero_ps()}; }
  static Lanes broadcast(float v) { return {_mm512_set1_ps(v)}; }
  static Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
};

inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Lanes mul_add(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }  // a * b + c
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.x, b.x)}; }                  // b where one is NaN
inline Lanes absolute(Lanes a) { return {_mm512_abs_ps(a.x)}; }
inline float sum_of(Lanes a) { return _mm512_reduce_add_ps(a.x); }
inline float largest_of(Lanes a) { return _mm512_reduce_max_ps(a.x); }

// 2^whole for whole numbers in -126 … 127; NaN gives anything.
inline Lanes power_of_two(Lanes whole) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(whole.x), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
inline Lanes nearest(Lanes a) {
  return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// `a`, but 0 where x is less than least (not where it is NaN).
inline Lanes zero_if_less(Lanes a, Lanes x, float least) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.x, _mm512_set1_ps(least), _CMP_NLT_UQ), a.x)};
}

inline void load_line(const float* p, Lanes (&parts)[1]) { parts[0] = Lanes::load(p); }
inline void load_line(const Bf16* p, Lanes (&parts)[2]) {
  const __m512i line = _mm512_loadu_si512(p);
  parts[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(line, 16))};
  parts[1] = {_mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline void load_line(const Fp16* p, Lanes (&parts)[2]) {
  const __m512i line = _mm512_loadu_si512(p);
  parts[0] = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(line))};
  parts[1] = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(line, 16)))};
}

struct IntLanes {
  __m512i x;

  static IntLanes zero() { return {_mm512_setzero_si512()}; }
  static IntLanes load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
  // Two int16 in every lane.
  static IntLanes broadcast_pair(const int16_t* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return {_mm512_set1_epi32(pair)};
  }
};

inline IntLanes operator+(IntLanes a, IntLanes b) { return {_mm512_add_epi32(a.x, b.x)}; }
inline Lanes to_lanes(IntLanes a) { return {_mm512_cvtepi32_ps(a.x)}; }
inline IntLanes add_to_256_times(IntLanes a, IntLanes b) {  // 256 * a + b
  return {_mm512_add_epi32(_mm512_slli_epi32(a.x, 8), b.x)};
}

// sum + a.low * b.low + a.high * b.high in every lane, halves being int16.
inline IntLanes add_pair_products(IntLanes sum, IntLanes a, IntLanes b) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpwssd_epi32(sum.x, a.x, b.x)};
#else
  sum = {_mm512_add_epi32(sum.x, _mm512_madd_epi16(a.x, b.x))};
  asm("" : "+v"(sum.x));  // as in the AVX2 form below
  return sum;
#endif
}

// Bytes 0 and 2 of each lane as int16, then bytes 1 and 3.
inline void load_line(const int8_t* p, IntLanes (&parts)[2]) {
  const __m512i line = _mm512_loadu_si512(p);
  parts[0] = {_mm512_srai_epi16(_mm512_slli_epi16(line, 8), 8)};
  parts[1] = {_mm512_srai_epi16(line, 8)};
}

inline __m256i to_int16(Lanes a) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.x)); }

#elif defined(__AVX2__)

struct Lanes {
  __m256 low, high;

  static Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Lanes broadcast(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  void store(float* p) const {
    _mm256_storeu_ps(p, low);
    _mm256_storeu_ps(p + 8, high);
  }
};

inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes mul_add(Lanes a, Lanes b, Lanes c) {  // a * b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes larger(Lanes a, Lanes b) {  // b where one is NaN
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Lanes absolute(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline float sum_of(Lanes a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_of(Lanes a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline __m256 power_of_two(__m256 whole) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
// 2^whole for whole numbers in -126 … 127; NaN gives anything.
inline Lanes power_of_two(Lanes whole) { return {power_of_two(whole.low), power_of_two(whole.high)}; }
inline Lanes nearest(Lanes a) {
  return {_mm256_round_ps(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// `a`, but 0 where x is less than least (not where it is NaN).
inline Lanes zero_if_less(Lanes a, Lanes x, float least) {
  const __m256 limit = _mm256_set1_ps(least);
  return {_mm256_and_ps(a.low, _mm256_cmp_ps(x.low, limit, _CMP_NLT_UQ)),
          _mm256_and_ps(a.high, _mm256_cmp_ps(x.high, limit, _CMP_NLT_UQ))};
}

inline void load_line(const float* p, Lanes (&parts)[1]) { parts[0] = Lanes::load(p); }
inline void load_line(const Bf16* p, Lanes (&parts)[2]) {
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  parts[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  parts[1] = {_mm256_castsi256_ps(_mm256_and_si256(low, high_half)),
              _mm256_castsi256_ps(_mm256_and_si256(high, high_half))};
}
// 16 numbers below 65536, as 16-bit numbers in the order of the lanes, widened from fp16.
inline Lanes widen_fp16(__m256i low, __m256i high) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}
inline void load_line(const Fp16* p, Lanes (&parts)[2]) {
  const __m256i low_half = _mm256_set1_epi32(0xffff);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  parts[0] = widen_fp16(_mm256_and_si256(low, low_half), _mm256_and_si256(high, low_half));
  parts[1] = widen_fp16(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
}

struct IntLanes {
  __m256i low, high;

  static IntLanes zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  // Two int16 in every lane.
  static IntLanes broadcast_pair(const int16_t* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
  }
};

inline IntLanes operator+(IntLanes a, IntLanes b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline Lanes to_lanes(IntLanes a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }

// sum + a.low * b.low + a.high * b.high in every lane, halves being int16.
inline IntLanes add_pair_products(IntLanes sum, IntLanes a, IntLanes b) {
  sum = {_mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, b.low)),
         _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, b.high))};
  // NOTE: GCC 12 would reorder whole additions into trees whose leaves do not fit into the registers: 1.6 times slower.
  asm("" : "+x"(sum.low), "+x"(sum.high));
  return sum;
}

// Bytes 0 and 2 of each lane as int16, then bytes 1 and 3.
inline void load_line(const int8_t* p, IntLanes (&parts)[2]) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  parts[0] = {_mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(high, 8), 8)};
  parts[1] = {_mm256_srai_epi16(low, 8), _mm256_srai_epi16(high, 8)};
}

inline __m256i to_int16(Lanes a) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

#else

// Plain loops, which the compiler vectorises with what every processor of the family has (SSE2, NEON).
struct Lanes {
  float x[16];

  static Lanes zero() { return broadcast(0.0f); }
  static Lanes broadcast(float v) {
    Lanes lanes;
    for (float& lane : lanes.x) lane = v;
    return lanes;
  }
  static Lanes load(const float* p) {
    Lanes lanes;
    memcpy(lanes.x, p, sizeof lanes.x);
    return lanes;
  }
  void store(float* p) const { memcpy(p, x, sizeof x); }
};

inline Lanes operator+(Lanes a, Lanes b) {
  for (int i = 0; i < 16; ++i) a.x[i] += b.x[i];
  return a;
}
inline Lanes operator*(Lanes a, Lanes b) {
  for (int i = 0; i < 16; ++i) a.x[i] *= b.x[i];
  return a;
}
inline Lanes mul_add(Lanes a, Lanes b, Lanes c) {  // a * b + c
  for (int i = 0; i < 16; ++i) a.x[i] = a.x[i] * b.x[i] + c.x[i];
  return a;
}
inline Lanes larger(Lanes a, Lanes b) {  // b where one is NaN
  for (int i = 0; i < 16; ++i) a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
  return a;
}
inline Lanes absolute(Lanes a) {
  for (float& lane : a.x) lane = __builtin_fabsf(lane);
  return a;
}
inline float sum_of(Lanes a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.x[i] += a.x[i + half];
  }
  return a.x[0];
}
inline float largest_of(Lanes a) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.x[i] = a.x[i] > a.x[i + half] ? a.x[i] : a.x[i + half];
  }
  return a.x[0];
}

// 2^whole for whole numbers in -126 … 127; NaN gives anything.
inline Lanes power_of_two(Lanes whole) {
  for (float& lane : whole.x) {
    const int exponent = lane == lane ? static_cast<int>(lane) + 127 : 0;
    lane = bits_to_float(static_cast<uint32_t>(exponent) << 23);
  }
  return whole;
}
// Adding and taking away 1.5 * 2^23 rounds; good for numbers up to 2^22.
inline Lanes nearest(Lanes a) {
  for (float& lane : a.x) lane = (lane + 0x1.8p23f) - 0x1.8p23f;
  return a;
}
// `a`, but 0 where x is less than least (not where it is NaN).
inline Lanes zero_if_less(Lanes a, Lanes x, float least) {
  for (int i = 0; i < 16; ++i) a.x[i] = x.x[i] < least ? 0.0f : a.x[i];
  return a;
}

inline void load_line(const float* p, Lanes (&parts)[1]) { parts[0] = Lanes::load(p); }
template <class Half>  // Bf16, Fp16
inline void load_line(const Half* p, Lanes (&parts)[2]) {
  for (int i = 0; i < 16; ++i) parts[0].x[i] = to_float(p[2 * i]);
  for (int i = 0; i < 16; ++i) parts[1].x[i] = to_float(p[2 * i + 1]);
}

// Pairs of int16 are kept apart here.
struct IntLanes {
  int32_t x[16];
  int32_t x_high[16];

  static IntLanes zero() { return {}; }
  static IntLanes load(const int32_t* p) {  // sums, not pairs
    IntLanes lanes{};
    memcpy(lanes.x, p, sizeof lanes.x);
    return lanes;
  }
  static IntLanes broadcast_pair(const int16_t* p) {
    IntLanes lanes;
    for (int i = 0; i < 16; ++i) lanes.x[i] = p[0];
    for (int i = 0; i < 16; ++i) lanes.x_high[i] = p[1];
    return lanes;
  }
};

inline IntLanes operator+(IntLanes a, IntLanes b) {
  for (int i = 0; i < 16; ++i) a.x[i] += b.x[i];
  return a;
}
inline Lanes to_lanes(IntLanes a) {
  Lanes lanes;
  for (int i = 0; i < 16; ++i) lanes.x[i] = static_cast<float>(a.x[i]);
  return lanes;
}
inline IntLanes add_to_256_times(IntLanes a, IntLanes b) {  // 256 * a + b
  for (int i = 0; i < 16; ++i) a.x[i] = 256 * a.x[i] + b.x[i];
  return a;
}
inline IntLanes add_pair_products(IntLanes sum, IntLanes a, IntLanes b) {
  for (int i = 0; i < 16; ++i) sum.x[i] += a.x[i] * b.x[i] + a.x_high[i] * b.x_high[i];
  return sum;
}
inline void load_line(const int8_t* p, IntLanes (&parts)[2]) {
  for (int i = 0; i < 16; ++i) {
    for (int part = 0; part < 2; ++part) {
      parts[part].x[i] = p[4 * i + part];
      parts[part].x_high[i] = p[4 * i + part + 2];
    }
  }
}
#endif

// Rounded to the nearest int16.
inline void store_int16(Lanes a, int16_t* p) {
#if defined(__AVX2__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_int16(a));
#else
  const Lanes whole = nearest(a);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>(whole.x[i]);
#endif
}

// The same, each four in the order 0, 2, 1, 3: that of the parts of an int8 line.
inline void store_int16_crossed(Lanes a, int16_t* p) {
#if defined(__AVX2__)
  const __m256i crossed = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(to_int16(a), 0xd8), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), crossed);
#else
  store_int16(a, p);
  for (int i = 0; i < 16; i += 4) {
    const int16_t second = p[i + 1];
    p[i + 1] = p[i + 2];
    p[i + 2] = second;
  }
#endif
}

inline void store_bf16(Lanes a, Bf16* p) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(a.x);
  memcpy(p, &rounded, sizeof rounded);
#else
  float x[16];
  a.store(x);
  for (int i = 0; i < 16; ++i) p[i] = to_bf16(x[i]);
#endif
}

// 2^x, within 2 ulp; 0 below 2^-126, x at most 127; NaN gives NaN.
//
// x = n + f, n whole and |f| <= 1/2; 2^f by a polynomial. Source of the coefficients: Cephes, exp2f (S. Moshier).
inline Lanes exp2_of(Lanes x) {
  const Lanes clamped = larger(Lanes::broadcast(-126.0f), x);
  const Lanes n = nearest(clamped);
  const Lanes f = mul_add(n, Lanes::broadcast(-1.0f), clamped);
  Lanes y = Lanes::broadcast(1.535336188319500e-4f);
  y = mul_add(y, f, Lanes::broadcast(1.339887440266574e-3f));
  y = mul_add(y, f, Lanes::broadcast(9.618437357674640e-3f));
  y = mul_add(y, f, Lanes::broadcast(5.550332471162809e-2f));
  y = mul_add(y, f, Lanes::broadcast(2.402264791363012e-1f));
  y = mul_add(y, f, Lanes::broadcast(6.931472028550421e-1f));
  y = mul_add(y, f, Lanes::broadcast(1.0f));
  return zero_if_less(y * power_of_two(n), x, -126.0f);
}

}  // namespace ambidex::AMBIDEX_ISA
