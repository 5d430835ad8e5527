// What a run of stored numbers is.
#pragma once

#include <cstddef>

namespace ambidex {

// kInt4 is of K and V alone: two numbers a byte (ops/kv_int4.h). The last six are GGUF's quantised types, for weights
// alone: integers of 4 to 8 bits in blocks that share scales.
enum class Number { kFp32, kBf16, kFp16, kInt8, kInt4, kQ8_0, kQ4_0, kQ4_1, kQ4_K, kQ5_K, kQ6_K };

// Of the numbers that lie one by one; of kInt4 a byte, which holds two.
constexpr std::size_t size_of(Number number) {
  return number == Number::kFp32 ? 4 : number == Number::kInt8 || number == Number::kInt4 ? 1 : 2;
}

// Numbers of a row that share a scale, in quantised types, and the bytes that they take; {1, size_of} for the others.
struct Block {
  std::size_t numbers, bytes;
};

constexpr Block block_of(Number number) {
  switch (number) {
    case Number::kQ8_0:
      return {32, 34};
    case Number::kQ4_0:
      return {32, 18};
    case Number::kQ4_1:
      return {32, 20};
    case Number::kQ4_K:
      return {256, 144};
    case Number::kQ5_K:
      return {256, 176};
    case Number::kQ6_K:
      return {256, 210};
    default:
      return {1, size_of(number)};
  }
}

constexpr bool is_quantized(Number number) { return block_of(number).numbers > 1; }

// Bytes of a row of that many numbers, whole blocks.
constexpr std::size_t row_bytes(Number number, std::size_t num_numbers) {
  const Block block = block_of(number);
  return num_numbers / block.numbers * block.bytes;
}

}  // namespace ambidex
