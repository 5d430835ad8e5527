// Scores as 16-bit codes: what bounded attention counts and compares 64 at a time. The same rules as in vec.h: nothing
// here has a name outside AMBIDEX_ISA.
#pragma once

#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

constexpr std::size_t kCodes = 64;  // of a row that are handled at once

// Sets all but those 16 of 64 codes to the nearest int16. Numbers beyond its range and NaN give any code.
inline void store_codes(Lanes a, int16_t* p) {
#if defined(__AVX2__)
  store_int16(a, p);
#else
  for (int i = 0; i < 16; ++i) {
    const float x = a.x[i] > -32768.0f ? a.x[i] < 32767.0f ? a.x[i] : 32767.0f : -32768.0f;
    p[i] = static_cast<int16_t>((x + 0x1.8p23f) - 0x1.8p23f);
  }
#endif
}

// The largest of 64 codes and `least`.
inline int largest_code(const int16_t* codes, int least) {
  int16_t most = static_cast<int16_t>(least);
  for (std::size_t i = 0; i < kCodes; ++i) most = codes[i] > most ? codes[i] : most;
  return most;
}

// The low byte of each of 64 codes, those below `least` taken for it.
inline void low_bytes(const int16_t* codes, int least, uint8_t* bytes) {
  const auto limit = static_cast<int16_t>(least);
  for (std::size_t i = 0; i < kCodes; ++i) bytes[i] = static_cast<uint8_t>(codes[i] > limit ? codes[i] : limit);
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
