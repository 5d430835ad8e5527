#include "ops/quant.h"

#include <cstring>

#include "core/check.h"
#include "simd/call.h"

namespace ambidex {
namespace {

// Where row `lane` of a group has its word of a line.
void add_word(std::uint8_t* line, std::size_t lane, std::uint32_t bits) {
  std::uint32_t word;
  std::memcpy(&word, line + 4 * lane, sizeof word);
  word |= bits;
  std::memcpy(line + 4 * lane, &word, sizeof word);
}

void put_fp16(std::uint8_t* line, std::size_t lane, const std::uint8_t* half) {
  std::memcpy(line + 2 * lane, half, 2);
}

// The lower 4 bits of numbers, 8 to a line.
void put_nibbles(std::uint8_t* lines, std::size_t lane, const std::uint8_t* numbers, std::size_t num_lines = 4) {
  for (std::size_t line = 0; line < num_lines; ++line) {
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < 8; ++i) word |= (numbers[8 * line + i] & 15u) << (16 * (i % 2) + 4 * (i / 2));
    add_word(lines + 64 * line, lane, word);
  }
}

// What lies above them, `bits` bits of each of `count` numbers, in one line.
void put_upper(std::uint8_t* line, std::size_t lane, const std::uint8_t* numbers, std::size_t count, std::size_t bits) {
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < count; ++i) {
    word |= static_cast<std::uint32_t>(numbers[i] >> 4) << (16 * (i % 2) + bits * (i / 2));
  }
  add_word(line, lane, word);
}

// 16 bytes, the lower halves being the first numbers → 32 numbers.
void split_nibbles(const std::uint8_t* bytes, std::uint8_t* numbers) {
  for (std::size_t i = 0; i < 16; ++i) {
    numbers[i] = bytes[i] & 15u;
    numbers[16 + i] = bytes[i] >> 4;
  }
}

// 32 signed bytes.
void put_bytes(std::uint8_t* lines, std::size_t lane, const std::uint8_t* numbers) {
  for (std::size_t line = 0; line < 8; ++line) {
    const std::uint8_t* some = numbers + 4 * line;
    const std::uint8_t crossed[4] = {some[0], some[2], some[1], some[3]};
    std::memcpy(lines + 64 * line + 4 * lane, crossed, sizeof crossed);
  }
}

// Q4_K and Q5_K: d, e, 12 bytes of 6-bit s and m, Q5_K's 32 bytes of fifth bits, 128 bytes of lower bits.
void pack_six_bit_scales(const std::uint8_t* block, std::uint8_t* record, std::size_t lane) {
  put_fp16(record, lane, block);
  put_fp16(record + 32, lane, block + 2);
  const std::uint8_t* bytes = block + 4;
  std::uint32_t words[3] = {};
  for (std::size_t j = 0; j < 8; ++j) {
    const std::uint32_t s = j < 4 ? bytes[j] & 63u : (bytes[j + 4] & 15u) | bytes[j - 4] >> 6 << 4;
    const std::uint32_t m = j < 4 ? bytes[j + 4] & 63u : bytes[j + 4] >> 4 | bytes[j] >> 6 << 4;
    words[0] |= (s & 15u) << 4 * j;
    words[1] |= (m & 15u) << 4 * j;
    words[2] |= s >> 4 << 2 * j | m >> 4 << (16 + 2 * j);
  }
  for (std::size_t i = 0; i < 3; ++i) add_word(record + 64 + 64 * i, lane, words[i]);
}

void pack_q4_k(const std::uint8_t* block, std::uint8_t* record, std::size_t lane) {
  pack_six_bit_scales(block, record, lane);
  for (std::size_t run = 0; run < 8; ++run) {
    std::uint8_t numbers[32];
    for (std::size_t i = 0; i < 32; ++i) numbers[i] = block[16 + run / 2 * 32 + i] >> (run % 2 * 4) & 15u;
    put_nibbles(record + 256 + run * 256, lane, numbers);
  }
}

void pack_q5_k(const std::uint8_t* block, std::uint8_t* record, std::size_t lane) {
  pack_six_bit_scales(block, record, lane);
  for (std::size_t run = 0; run < 8; ++run) {
    std::uint8_t numbers[32];
    for (std::size_t i = 0; i < 32; ++i) {
      const unsigned fifth = block[16 + i] >> run & 1u, lower = block[48 + run / 2 * 32 + i] >> (run % 2 * 4) & 15u;
      numbers[i] = static_cast<std::uint8_t>(lower | fifth << 4);
    }
    std::uint8_t* lines = record + 256 + run * 320;
    put_upper(lines, lane, numbers, 32, 1);
    put_nibbles(lines + 64, lane, numbers);
  }
}

// 128 bytes of lower bits, 64 of upper ones, 16 scales s, d. In each half of 128 numbers, number 32 q + i has its lower
// bits in byte 32 (q % 2) + i, its upper ones in byte i.
void pack_q6_k(const std::uint8_t* block, std::uint8_t* record, std::size_t lane) {
  put_fp16(record, lane, block + 208);
  for (std::size_t i = 0; i < 16; ++i) record[32 + i / 4 * 64 + 4 * lane + i % 4] = block[192 + i];
  for (std::size_t run = 0; run < 16; ++run) {
    const std::size_t half = run / 8, quarter = run % 8 / 2;
    std::uint8_t numbers[16];
    for (std::size_t n = 0; n < 16; ++n) {
      const std::size_t i = run % 2 * 16 + n;
      const unsigned lower = block[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15u;
      const unsigned upper = block[128 + half * 32 + i] >> (2 * quarter) & 3u;
      numbers[n] = static_cast<std::uint8_t>(lower | upper << 4);
    }
    std::uint8_t* lines = record + 288 + run * 192;
    put_upper(lines, lane, numbers, 16, 2);
    put_nibbles(lines + 64, lane, numbers, 2);
  }
}

void pack_block(Number number, const std::uint8_t* block, std::uint8_t* record, std::size_t lane) {
  std::uint8_t numbers[32];
  switch (number) {
    case Number::kQ8_0:
      put_fp16(record, lane, block);
      return put_bytes(record + 32, lane, block + 2);
    case Number::kQ4_0:
      put_fp16(record, lane, block);
      split_nibbles(block + 2, numbers);
      return put_nibbles(record + 32, lane, numbers);
    case Number::kQ4_1:
      put_fp16(record, lane, block);
      put_fp16(record + 32, lane, block + 2);
      split_nibbles(block + 4, numbers);
      return put_nibbles(record + 64, lane, numbers);
    case Number::kQ4_K:
      return pack_q4_k(block, record, lane);
    case Number::kQ5_K:
      return pack_q5_k(block, record, lane);
    case Number::kQ6_K:
      return pack_q6_k(block, record, lane);
    default:
      return;
  }
}

}  // namespace

// Defined in quant-inl.h.
#define AMBIDEX_DECLARE_QUANT(isa) \
  namespace isa {                  \
  void unpack_rows(const UnpackCall& call); \
  }
AMBIDEX_DECLARE_QUANT(generic)
AMBIDEX_DECLARE_QUANT(avx2)
AMBIDEX_DECLARE_QUANT(avx512)
AMBIDEX_DECLARE_QUANT(avx512bf16)
AMBIDEX_DECLARE_QUANT(amx)
#undef AMBIDEX_DECLARE_QUANT

void unpack_rows(Isa isa, const UnpackCall& call) { AMBIDEX_CALL(isa, unpack_rows, call); }

void pack_rows(const PackCall& call) {
  const Block block = block_of(call.number);
  const std::size_t num_blocks = call.num_in / block.numbers, bytes_per_row = row_bytes(call.number, call.num_in);
  for (std::size_t i = 0; i < call.num_rows; ++i) {
    const std::size_t row = call.first_row + i;
    std::uint8_t* group = call.packed + row / kGroupRows * kGroupRows * bytes_per_row;
    for (std::size_t b = 0; b < num_blocks; ++b) {
      pack_block(call.number, call.rows + i * bytes_per_row + b * block.bytes, group + b * kGroupRows * block.bytes,
                 row % kGroupRows);
    }
  }
}

}  // namespace ambidex
