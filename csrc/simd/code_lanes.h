// Scores as 16-bit codes: what bounded attention counts and compares 64 at a time. The same rules as in vec.h: nothing
// here has a name outside AMBIDEX_ISA.
#pragma once

#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

constexpr std::size_t kCodes = 64;  // of a row that are handled at once

// A row's 64 codes in registers, in the order of the keys.
#if defined(__AVX512BW__)

struct Codes {
  __m512i low, high;

  static Codes load(const int16_t* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 32)}; }
  void store(int16_t* p) const {
    _mm512_storeu_si512(p, low);
    _mm512_storeu_si512(p + 32, high);
  }
};

// The quarters of a and b, of which packing puts each of b behind that of a, one behind the other.
inline __m512i in_order(__m512i packed) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

inline Codes to_codes(const Lanes (&a)[4]) {
  const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(a[0].x), _mm512_cvtps_epi32(a[1].x));
  const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(a[2].x), _mm512_cvtps_epi32(a[3].x));
  return {in_order(low), in_order(high)};
}

inline bool any_above(const Codes& a, int most) {
  const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(most));
  return (_mm512_cmpgt_epi16_mask(a.low, limit) | _mm512_cmpgt_epi16_mask(a.high, limit)) != 0;
}

inline void low_bytes(const Codes& a, int least, uint8_t* bytes) {
  const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(least)), byte = _mm512_set1_epi16(255);
  const __m512i low = _mm512_and_si512(_mm512_max_epi16(a.low, limit), byte);
  const __m512i high = _mm512_and_si512(_mm512_max_epi16(a.high, limit), byte);
  _mm512_storeu_si512(bytes, in_order(_mm512_packus_epi16(low, high)));
}

#elif defined(__AVX2__)

struct Codes {
  __m256i x[4];

  static Codes load(const int16_t* p) {
    Codes codes;
    for (int i = 0; i < 4; ++i) codes.x[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 * i));
    return codes;
  }
  void store(int16_t* p) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16 * i), x[i]);
  }
};

inline Codes to_codes(const Lanes (&a)[4]) {
  return {{to_int16(a[0]), to_int16(a[1]), to_int16(a[2]), to_int16(a[3])}};
}

inline bool any_above(const Codes& a, int most) {
  const __m256i limit = _mm256_set1_epi16(static_cast<int16_t>(most));
  const __m256i all = _mm256_max_epi16(_mm256_max_epi16(a.x[0], a.x[1]), _mm256_max_epi16(a.x[2], a.x[3]));
  return _mm256_movemask_epi8(_mm256_cmpgt_epi16(all, limit)) != 0;
}

inline void low_bytes(const Codes& a, int least, uint8_t* bytes) {
  const __m256i limit = _mm256_set1_epi16(static_cast<int16_t>(least)), byte = _mm256_set1_epi16(255);
  for (int i = 0; i < 2; ++i) {
    const __m256i first = _mm256_and_si256(_mm256_max_epi16(a.x[2 * i], limit), byte);
    const __m256i second = _mm256_and_si256(_mm256_max_epi16(a.x[2 * i + 1], limit), byte);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 32 * i),
                        _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8));
  }
}

#else

struct Codes {
  int16_t x[kCodes];

  static Codes load(const int16_t* p) {
    Codes codes;
    memcpy(codes.x, p, sizeof codes.x);
    return codes;
  }
  void store(int16_t* p) const { memcpy(p, x, sizeof x); }
};

inline Codes to_codes(const Lanes (&a)[4]) {
  Codes codes;
  for (std::size_t i = 0; i < kCodes; ++i) {
    const float x = a[i / 16].x[i % 16];
    const float held = x > -32768.0f ? x < 32767.0f ? x : 32767.0f : -32768.0f;
    codes.x[i] = static_cast<int16_t>((held + 0x1.8p23f) - 0x1.8p23f);
  }
  return codes;
}

inline bool any_above(const Codes& a, int most) {
  bool found = false;
  for (std::size_t i = 0; i < kCodes; ++i) found |= a.x[i] > most;
  return found;
}

inline void low_bytes(const Codes& a, int least, uint8_t* bytes) {
  const auto limit = static_cast<int16_t>(least);
  for (std::size_t i = 0; i < kCodes; ++i) bytes[i] = static_cast<uint8_t>(a.x[i] > limit ? a.x[i] : limit);
}

#endif

// to_codes: the nearest int16; numbers beyond its range and NaN give any code. any_above: some code is above `most`.
// low_bytes: of each code, those below `least` taken for it.

inline int largest_code(const Codes& a) {
  int16_t codes[kCodes];
  a.store(codes);
  int16_t most = codes[0];
  for (std::size_t i = 1; i < kCodes; ++i) most = codes[i] > most ? codes[i] : most;
  return most;
}

// Bit i: code i of 64 is not less than `least`.
inline uint64_t codes_from(const int16_t* codes, int least) {
#if defined(__AVX512BW__)
  const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(least));
  const uint64_t low = _mm512_cmpge_epi16_mask(_mm512_loadu_si512(codes), limit);
  const uint64_t high = _mm512_cmpge_epi16_mask(_mm512_loadu_si512(codes + 32), limit);
  return low | high << 32;
#elif defined(__AVX2__)
  const __m256i limit = _mm256_set1_epi16(static_cast<int16_t>(least));
  uint64_t below = 0;
  for (int i = 0; i < 2; ++i) {
    const auto* half = reinterpret_cast<const __m256i*>(codes + 32 * i);
    const __m256i first = _mm256_cmpgt_epi16(limit, _mm256_loadu_si256(half));
    const __m256i second = _mm256_cmpgt_epi16(limit, _mm256_loadu_si256(half + 1));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8);
    below |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(both))) << (32 * i);
  }
  return ~below;
#else
  uint64_t bits = 0;
  for (std::size_t i = 0; i < kCodes; ++i) bits |= static_cast<uint64_t>(codes[i] >= least) << i;
  return bits;
#endif
}

// x = 2^23 (y + 127) gives 2^y, or up to 1.0615 times as much: the bits of a number are 2^23 times its logarithm but for
// the curve within a factor of 2. 0 for x below 0 and for NaN; y must be below 128.
inline Lanes power_from_bits(Lanes x) {
  const Lanes bits = larger(x, Lanes::zero());
#if defined(__AVX512F__)
  return {_mm512_castsi512_ps(_mm512_cvttps_epi32(bits.x))};
#elif defined(__AVX2__)
  return {_mm256_castsi256_ps(_mm256_cvttps_epi32(bits.low)), _mm256_castsi256_ps(_mm256_cvttps_epi32(bits.high))};
#else
  Lanes power;
  for (int i = 0; i < 16; ++i) power.x[i] = bits_to_float(static_cast<uint32_t>(bits.x[i]));
  return power;
#endif
}
constexpr float kMostPower = 1.0615f;  // (1 + f) / 2^f is largest at f = 1 / ln 2 - 1: 1.06148

}  // namespace ambidex::AMBIDEX_ISA
