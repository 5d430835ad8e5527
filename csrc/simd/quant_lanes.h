// Integers of 4 and 8 bits as pairs of 16-bit ones in 16 lanes, and fp16 scales of 16 rows (ops/quant.h). The same rules
// as in vec.h: nothing here has a name outside AMBIDEX_ISA.
#pragma once

#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

#if defined(__AVX512F__)

inline IntLanes broadcast_int(int32_t value) { return {_mm512_set1_epi32(value)}; }

inline Lanes load_fp16(const char* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// The four pairs of 4-bit integers in each lane of a line.
inline void load_nibbles(const char* p, IntLanes (&parts)[4]) {
  const __m512i line = _mm512_loadu_si512(p), low = _mm512_set1_epi16(15);
  parts[0] = {_mm512_and_si512(line, low)};
  parts[1] = {_mm512_and_si512(_mm512_srli_epi16(line, 4), low)};
  parts[2] = {_mm512_and_si512(_mm512_srli_epi16(line, 8), low)};
  parts[3] = {_mm512_srli_epi16(line, 12)};
}

// The same pairs as bf16, 16 more each: integers in the four bits below the exponent of 16. Four lines at `to`.
inline void store_nibbles_from_16(const char* p, char* to) {
  const __m512i line = _mm512_loadu_si512(p), mask = _mm512_set1_epi16(0x78), sixteen = _mm512_set1_epi16(0x4180);
  constexpr int kMaskThenOr = 0xea;
  _mm512_store_si512(to, _mm512_ternarylogic_epi32(_mm512_slli_epi16(line, 3), mask, sixteen, kMaskThenOr));
  _mm512_store_si512(to + 64, _mm512_ternarylogic_epi32(_mm512_srli_epi16(line, 1), mask, sixteen, kMaskThenOr));
  _mm512_store_si512(to + 128, _mm512_ternarylogic_epi32(_mm512_srli_epi16(line, 5), mask, sixteen, kMaskThenOr));
  _mm512_store_si512(to + 192, _mm512_ternarylogic_epi32(_mm512_srli_epi16(line, 9), mask, sixteen, kMaskThenOr));
}

// Integers of a few bits of the words in a line, and the signed bytes of them.
inline IntLanes bit_field(const char* p, int shift, int32_t mask) {
  const __m512i words = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
  return {_mm512_and_si512(words, _mm512_set1_epi32(mask))};
}
inline IntLanes byte_of(const char* p, int index) {
  const __m512i words = _mm512_sll_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(24 - 8 * index));
  return {_mm512_srai_epi32(words, 24)};
}

// Adds to four parts of 4 bits what lies above them: kBits bits a number, those of the first part from bit `first` on.
template <int kBits>
inline void add_upper_bits(const char* p, int first, IntLanes (&parts)[4]) {
  const __m512i line = _mm512_loadu_si512(p), mask = _mm512_set1_epi16(((1 << kBits) - 1) << 4);
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    const int shift = first + part * kBits - 4;
    const __m512i moved = shift < 0 ? _mm512_slli_epi16(line, static_cast<unsigned>(-shift))
                                    : _mm512_srli_epi16(line, static_cast<unsigned>(shift));
    parts[part] = {_mm512_or_si512(parts[part].x, _mm512_and_si512(moved, mask))};
  }
}

#elif defined(__AVX2__)

inline IntLanes broadcast_int(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }

inline Lanes load_fp16(const char* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}

// The four pairs of 4-bit integers in each lane of a line.
inline void load_nibbles(const char* p, IntLanes (&parts)[4]) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  const __m256i low = _mm256_set1_epi16(15);
  parts[0] = {_mm256_and_si256(a, low), _mm256_and_si256(b, low)};
  parts[1] = {_mm256_and_si256(_mm256_srli_epi16(a, 4), low), _mm256_and_si256(_mm256_srli_epi16(b, 4), low)};
  parts[2] = {_mm256_and_si256(_mm256_srli_epi16(a, 8), low), _mm256_and_si256(_mm256_srli_epi16(b, 8), low)};
  parts[3] = {_mm256_srli_epi16(a, 12), _mm256_srli_epi16(b, 12)};
}

// Integers of a few bits of the words in a line, and the signed bytes of them.
inline IntLanes bit_field(const char* p, int shift, int32_t mask) {
  const __m128i count = _mm_cvtsi32_si128(shift);
  const __m256i some = _mm256_set1_epi32(mask);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  return {_mm256_and_si256(_mm256_srl_epi32(low, count), some), _mm256_and_si256(_mm256_srl_epi32(high, count), some)};
}
inline IntLanes byte_of(const char* p, int index) {
  const __m128i count = _mm_cvtsi32_si128(24 - 8 * index);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  return {_mm256_srai_epi32(_mm256_sll_epi32(low, count), 24), _mm256_srai_epi32(_mm256_sll_epi32(high, count), 24)};
}

// Adds to four parts of 4 bits what lies above them: kBits bits a number, those of the first part from bit `first` on.
template <int kBits>
inline void add_upper_bits(const char* p, int first, IntLanes (&parts)[4]) {
  const __m256i mask = _mm256_set1_epi16(((1 << kBits) - 1) << 4);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
#pragma GCC unroll 4
  for (int part = 0; part < 4; ++part) {
    const int shift = first + part * kBits - 4;
    const __m256i a = shift < 0 ? _mm256_slli_epi16(low, -shift) : _mm256_srli_epi16(low, shift);
    const __m256i b = shift < 0 ? _mm256_slli_epi16(high, -shift) : _mm256_srli_epi16(high, shift);
    parts[part] = {_mm256_or_si256(parts[part].low, _mm256_and_si256(a, mask)),
                   _mm256_or_si256(parts[part].high, _mm256_and_si256(b, mask))};
  }
}

#else

inline IntLanes broadcast_int(int32_t value) {
  IntLanes lanes = IntLanes::zero();
  for (int32_t& lane : lanes.x) lane = value;
  return lanes;
}

inline Lanes load_fp16(const char* p) {
  Fp16 halves[16];
  memcpy(halves, p, sizeof halves);
  Lanes lanes;
  for (int i = 0; i < 16; ++i) lanes.x[i] = to_float(halves[i]);
  return lanes;
}

// The four pairs of 4-bit integers in each lane of a line.
inline void load_nibbles(const char* p, IntLanes (&parts)[4]) {
  uint32_t words[16];
  memcpy(words, p, sizeof words);
  for (int part = 0; part < 4; ++part) {
    for (int i = 0; i < 16; ++i) {
      parts[part].x[i] = static_cast<int32_t>(words[i] >> 4 * part & 15u);
      parts[part].x_high[i] = static_cast<int32_t>(words[i] >> (16 + 4 * part) & 15u);
    }
  }
}

// The same pairs as bf16, 16 more each: integers in the four bits below the exponent of 16. Four lines at `to`.
inline void store_nibbles_from_16(const char* p, char* to) {
  uint32_t words[16], pairs[16];
  memcpy(words, p, sizeof words);
  for (int part = 0; part < 4; ++part) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t moved = part == 0 ? words[i] << 3 : words[i] >> (4 * part - 3);
      pairs[i] = (moved & 0x00780078u) | 0x41804180u;
    }
    memcpy(to + 64 * part, pairs, sizeof pairs);
  }
}

// Integers of a few bits of the words in a line, and the signed bytes of them.
inline IntLanes bit_field(const char* p, int shift, int32_t mask) {
  uint32_t words[16];
  memcpy(words, p, sizeof words);
  IntLanes lanes = IntLanes::zero();
  for (int i = 0; i < 16; ++i) lanes.x[i] = static_cast<int32_t>(words[i] >> shift) & mask;
  return lanes;
}
inline IntLanes byte_of(const char* p, int index) {
  IntLanes lanes = IntLanes::zero();
  for (int i = 0; i < 16; ++i) lanes.x[i] = reinterpret_cast<const int8_t*>(p)[4 * i + index];
  return lanes;
}

// Adds to four parts of 4 bits what lies above them: kBits bits a number, those of the first part from bit `first` on.
template <int kBits>
inline void add_upper_bits(const char* p, int first, IntLanes (&parts)[4]) {
  for (int part = 0; part < 4; ++part) {
    const IntLanes some = bit_field(p, first + part * kBits, (1 << kBits) - 1);
    const IntLanes next = bit_field(p, 16 + first + part * kBits, (1 << kBits) - 1);
    for (int i = 0; i < 16; ++i) parts[part].x[i] += 16 * some.x[i];
    for (int i = 0; i < 16; ++i) parts[part].x_high[i] += 16 * next.x[i];
  }
}

#endif

}  // namespace ambidex::AMBIDEX_ISA
