// Body of read_all, compiled once per instruction set (per_isa.cpp).
#pragma once

#include <stdint.h>
#include <string.h>

#include "ops/read.h"
#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

// The sum of all 8-byte words, four lines at a time: as fast as memory gives them.
uint64_t read_bytes(const char* bytes, std::size_t num_bytes) {
  uint64_t total = 0;
  std::size_t i = 0;
#if defined(__AVX512F__)
  __m512i sums[4] = {};
  for (; i + 256 <= num_bytes; i += 256) {
    for (int j = 0; j < 4; ++j) sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512(bytes + i + 64 * j));
  }
  for (__m512i sum : sums) total += static_cast<uint64_t>(_mm512_reduce_add_epi64(sum));
#elif defined(__AVX2__)
  __m256i sums[8] = {};
  for (; i + 256 <= num_bytes; i += 256) {
    for (int j = 0; j < 8; ++j) {
      sums[j] = _mm256_add_epi64(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i + 32 * j)));
    }
  }
  for (__m256i sum : sums) {
    uint64_t words[4];
    memcpy(words, &sum, sizeof words);
    for (uint64_t word : words) total += word;
  }
#endif
  for (; i + 8 <= num_bytes; i += 8) {
    uint64_t word;
    memcpy(&word, bytes + i, sizeof word);
    total += word;
  }
  for (; i < num_bytes; ++i) total += static_cast<unsigned char>(bytes[i]);
  return total;
}

}  // namespace ambidex::AMBIDEX_ISA
