// AMX tiles: 16 rows of 64 bytes. With AMBIDEX_EMULATE_TILES the same operations in plain loops, so that tests run the
// kernels that use them on any machine.
#pragma once

#include <stdint.h>
#include <string.h>

#include <cstddef>

#include "simd/lanes.h"

namespace ambidex::AMBIDEX_ISA {

#if defined(AMBIDEX_EMULATE_TILES) || defined(__AMX_BF16__)

// Register numbers: sums, the left operand, the right operand (more than one of each, to overlap their latencies).
enum TileUse { kSum = 0, kLeft = 4, kRight = 6 };

// A product has left [rows, depth], right [depth / pack lines, 16 lanes, pack] and sum [rows, 16] of 4 bytes.
struct TileShape {
  std::size_t rows;   // 1 … 16
  std::size_t lines;  // 1 … 16
};

#endif

#if defined(AMBIDEX_EMULATE_TILES)

struct Tiles {
  struct Tile {
    std::size_t rows, row_bytes;
    unsigned char bytes[16][64];
  };

  void configure(TileShape shape) {
    if (shape_.rows == shape.rows && shape_.lines == shape.lines) return;
    shape_ = shape;
    for (int i = 0; i < 8; ++i) {
      const std::size_t rows = i < kRight ? shape.rows : shape.lines;
      const std::size_t row_bytes = i >= kLeft && i < kRight ? 4 * shape.lines : 64;
      tile[i].rows = rows;
      tile[i].row_bytes = row_bytes;
      memset(tile[i].bytes, 0, sizeof tile[i].bytes);
    }
  }
  TileShape shape() const { return shape_; }
  template <int kTile>
  void zero() {
    memset(tile[kTile].bytes, 0, sizeof tile[kTile].bytes);
  }
  template <int kTile>
  void load(const void* from, std::size_t stride) {
    zero<kTile>();
    for (std::size_t row = 0; row < tile[kTile].rows; ++row) {
      memcpy(tile[kTile].bytes[row], static_cast<const char*>(from) + row * stride, tile[kTile].row_bytes);
    }
  }
  template <int kTile>
  void store(void* to, std::size_t stride) const {
    for (std::size_t row = 0; row < tile[kTile].rows; ++row) {
      memcpy(static_cast<char*>(to) + row * stride, tile[kTile].bytes[row], tile[kTile].row_bytes);
    }
  }
  template <int kInto, int kA, int kB>
  void add_bf16_product() {
    add_product<kInto, kA, kB, float, Bf16>([](Bf16 x) { return to_float(x); });
  }
  template <int kInto, int kA, int kB>
  void add_int8_product() {
    add_product<kInto, kA, kB, int32_t, int8_t>([](int8_t x) { return static_cast<int32_t>(x); });
  }

 private:
  Tile tile[8];
  TileShape shape_{};

  template <int kInto, int kA, int kB, class Sum, class Element, class Widen>
  void add_product(const Widen& widen) {
    constexpr std::size_t kPack = 4 / sizeof(Element);
    for (std::size_t row = 0; row < tile[kInto].rows; ++row) {
      for (std::size_t line = 0; line < tile[kB].rows; ++line) {
        for (std::size_t lane = 0; lane < 16; ++lane) {
          Sum sum;
          memcpy(&sum, tile[kInto].bytes[row] + 4 * lane, sizeof sum);
          for (std::size_t i = 0; i < kPack; ++i) {
            Element a, b;
            memcpy(&a, tile[kA].bytes[row] + (line * kPack + i) * sizeof a, sizeof a);
            memcpy(&b, tile[kB].bytes[line] + (lane * kPack + i) * sizeof b, sizeof b);
            sum += widen(a) * widen(b);
          }
          memcpy(tile[kInto].bytes[row] + 4 * lane, &sum, sizeof sum);
        }
      }
    }
  }
};

#elif defined(__AMX_BF16__)

// Instructions written out: GCC 12's macros take register numbers as text, not from a template, and its
// _tile_loadconfig tells the optimiser that only 8 of the 64 bytes are read, which drops the other stores.
struct Tiles {
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (shape_.rows != 0) asm volatile("tilerelease");  // else the kernel saves 8 KiB at each switch of threads
  }

  // Sets all tiles to zero, too; about 100 cycles, so only where the shape changes.
  void configure(TileShape shape) {
    if (shape_.rows == shape.rows && shape_.lines == shape.lines) return;
    shape_ = shape;
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = static_cast<uint8_t>(i < kRight ? shape.rows : shape.lines);
      config.row_bytes[i] = static_cast<uint16_t>(i >= kLeft && i < kRight ? 4 * shape.lines : 64);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  TileShape shape() const { return shape_; }
  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static void load(const void* from, std::size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, std::size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kInto, int kA, int kB>
  static void add_bf16_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kInto), "i"(kA), "i"(kB));
  }
  template <int kInto, int kA, int kB>
  static void add_int8_product() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kInto), "i"(kA), "i"(kB));
  }

 private:
  TileShape shape_{};
};

#endif

}  // namespace ambidex::AMBIDEX_ISA
