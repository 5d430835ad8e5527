// How each quantised type is read out of a record (quant.h), for all 16 rows at once.
//
//   kRuns     runs of a record, kNumbers numbers each, kRunBytes bytes each from kRunsAt on
//   kLines    lines of a run that `load` turns into kParts pairs of integers each
//   kOffset   what is taken off the integers
//   scale     of a run; min: what is added, if kHasMins
#pragma once

#include "ops/quant.h"
#include "simd/quant_lanes.h"

namespace ambidex::AMBIDEX_ISA {

struct Q8_0 {
  static constexpr Number kNumber = Number::kQ8_0;
  static constexpr std::size_t kRuns = 1, kNumbers = 32, kRunBytes = 512, kRunsAt = 32, kLines = 8, kParts = 2;
  static constexpr bool kHasMins = false;
  static constexpr int32_t kOffset = 0;
  static Lanes scale(const char* record, std::size_t) { return load_fp16(record); }
  static Lanes min(const char*, std::size_t) { return Lanes::zero(); }
  static void load(const char* run, std::size_t line, IntLanes (&parts)[2]) {
    load_line(reinterpret_cast<const int8_t*>(run + 64 * line), parts);
  }
};

struct Q4_0 {
  static constexpr Number kNumber = Number::kQ4_0;
  static constexpr std::size_t kRuns = 1, kNumbers = 32, kRunBytes = 256, kRunsAt = 32, kLines = 4, kParts = 4;
  static constexpr bool kHasMins = false;
  static constexpr int32_t kOffset = 8;
  static Lanes scale(const char* record, std::size_t) { return load_fp16(record); }
  static Lanes min(const char*, std::size_t) { return Lanes::zero(); }
  static void load(const char* run, std::size_t line, IntLanes (&parts)[4]) { load_nibbles(run + 64 * line, parts); }
};

struct Q4_1 {
  static constexpr Number kNumber = Number::kQ4_1;
  static constexpr std::size_t kRuns = 1, kNumbers = 32, kRunBytes = 256, kRunsAt = 64, kLines = 4, kParts = 4;
  static constexpr bool kHasMins = true;
  static constexpr int32_t kOffset = 0;
  static Lanes scale(const char* record, std::size_t) { return load_fp16(record); }
  static Lanes min(const char* record, std::size_t) { return load_fp16(record + 32); }
  static void load(const char* run, std::size_t line, IntLanes (&parts)[4]) { load_nibbles(run + 64 * line, parts); }
};

// 6-bit integers of Q4_K and Q5_K: four lower bits in one line, two upper ones in another.
inline Lanes six_bits(const char* lower, int lower_shift, const char* upper, int upper_shift) {
  return mul_add(to_lanes(bit_field(upper, upper_shift, 3)), Lanes::broadcast(16.0f),
                 to_lanes(bit_field(lower, lower_shift, 15)));
}

struct Q4_K {
  static constexpr Number kNumber = Number::kQ4_K;
  static constexpr std::size_t kRuns = 8, kNumbers = 32, kRunBytes = 256, kRunsAt = 256, kLines = 4, kParts = 4;
  static constexpr bool kHasMins = true;
  static constexpr int32_t kOffset = 0;
  static Lanes scale(const char* record, std::size_t run) {
    const int j = static_cast<int>(run);
    return load_fp16(record) * six_bits(record + 64, 4 * j, record + 192, 2 * j);
  }
  static Lanes min(const char* record, std::size_t run) {
    const int j = static_cast<int>(run);
    return load_fp16(record + 32) * six_bits(record + 128, 4 * j, record + 192, 16 + 2 * j) * Lanes::broadcast(-1.0f);
  }
  static void load(const char* run, std::size_t line, IntLanes (&parts)[4]) { load_nibbles(run + 64 * line, parts); }
};

struct Q5_K : Q4_K {
  static constexpr Number kNumber = Number::kQ5_K;
  static constexpr std::size_t kRunBytes = 320;
  static void load(const char* run, std::size_t line, IntLanes (&parts)[4]) {
    load_nibbles(run + 64 + 64 * line, parts);
    add_upper_bits<1>(run, static_cast<int>(4 * line), parts);
  }
};

struct Q6_K {
  static constexpr Number kNumber = Number::kQ6_K;
  static constexpr std::size_t kRuns = 16, kNumbers = 16, kRunBytes = 192, kRunsAt = 288, kLines = 2, kParts = 4;
  static constexpr bool kHasMins = false;
  static constexpr int32_t kOffset = 32;
  static Lanes scale(const char* record, std::size_t run) {
    return load_fp16(record) * to_lanes(byte_of(record + 32 + run / 4 * 64, static_cast<int>(run % 4)));
  }
  static Lanes min(const char*, std::size_t) { return Lanes::zero(); }
  static void load(const char* run, std::size_t line, IntLanes (&parts)[4]) {
    load_nibbles(run + 64 + 64 * line, parts);
    add_upper_bits<2>(run, static_cast<int>(8 * line), parts);
  }
};

}  // namespace ambidex::AMBIDEX_ISA
