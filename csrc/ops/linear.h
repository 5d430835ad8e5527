// linear: y = x · Wᵀ (+ bias) (+ residual) for matrices of one width over the same x, which then are one call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "core/number.h"
#include "core/pool.h"
#include "simd/isa.h"

namespace ambidex {

// Weights of one matrix, [num_out, num_in] without gaps or packed (ops/quant.h), and its bias [num_out] or null. Not owned.
struct Matrix {
  const void* weight;
  const float* bias;
  std::size_t num_out;
};

// Matrices of one width and number format; all formats but int8.
struct Matrices {
  Number number;
  std::size_t num_in;
  std::vector<Matrix> parts;
};

// What a matrix gives: y [T, num_out], and what is added to it, [T, num_out] or null; they may be the same memory.
struct Product {
  float* y;
  const float* residual;
};

// x for products in AMX tiles (linear_tiles-inl.h): tokens in blocks of 16, numbers in pieces of 512, missing ones zero. A
// piece of a block takes kMostTerms * kPieceBytes: its terms one after the other, each 16 right operands of 32 numbers.
constexpr std::size_t kTileRows = 16, kTileTokens = 16, kTileNumbers = 32, kTileLines = 16, kTileBytes = 64;
constexpr std::size_t kPieceTiles = 16, kPieceNumbers = kPieceTiles * kTileNumbers;
constexpr std::size_t kPieceBytes = kPieceNumbers * kTileTokens * 2;
constexpr std::size_t kMostTerms = 3;
constexpr std::size_t kMostTileRows = 64;  // of a range

// x for quantised weights in tiles (quant_tiles-inl.h): pieces of 8 runs of 32 numbers. A piece of a block holds its two
// terms, each 8 left operands of 16 tokens, then the 8 times 16 sums of them.
constexpr std::size_t kQuantPieceRuns = 8, kQuantPieceNumbers = kQuantPieceRuns * kTileNumbers, kQuantTerms = 2;
constexpr std::size_t kQuantTermBytes = kQuantPieceNumbers * kTileTokens * 2;
constexpr std::size_t kQuantPieceBytes = kQuantTerms * kQuantTermBytes + kQuantPieceRuns * kTileTokens * sizeof(float);

constexpr std::size_t tile_blocks(std::size_t num_tokens) { return (num_tokens + kTileTokens - 1) / kTileTokens; }
constexpr std::size_t tile_pieces(std::size_t num_in) { return (num_in + kPieceNumbers - 1) / kPieceNumbers; }
constexpr std::size_t tile_pieces(Number number, std::size_t num_in) {
  return is_quantized(number) ? (num_in + kQuantPieceNumbers - 1) / kQuantPieceNumbers : tile_pieces(num_in);
}
constexpr std::size_t tile_piece_bytes(Number number) {
  return is_quantized(number) ? kQuantPieceBytes : kMostTerms * kPieceBytes;
}

struct TokenTiles {
  const char* data;           // [blocks][pieces][tile_piece_bytes], 64-byte aligned; or null: x is not in tiles
  const std::uint8_t* terms;  // [blocks][pieces], 1 or the most
};

// `num_rows` rows of a matrix from first_row on, times all tokens.
struct LinearRange {
  Number number;
  const void* weight;   // of first_row, which begins a group if the matrix is packed
  const float* bias;    // of first_row, or null
  std::size_t num_rows, num_in;
  const float* x;       // packed: [T, packed_width], see pack_tokens;
  TokenTiles tiles;     // or in tiles
  std::size_t num_tokens;
  float* y;             // token t and row r go to y[t * y_stride + r]
  const float* residual;
  std::size_t y_stride;
};

// The memory that linear keeps from call to call, and the threads that it shares with other ops.
class LinearPool {
 public:
  // Where the instruction set has tiles, tiles_quantized says whether 4-bit weights are multiplied in them.
  explicit LinearPool(ThreadPool& threads, bool tiles_quantized = false)
      : threads_(threads), tiles_quantized_(tiles_quantized) {}

  // x: [num_tokens, num_in]; products: one for each matrix. Each weight is read from memory once, whatever the number of
  // tokens. Products and sums are fp32. Two calls at a time run one after the other. Allocates only when a call is larger
  // than every one before it.
  void multiply(Isa isa, const Matrices& matrices, const float* x, std::size_t num_tokens, const Product* products);

 private:
  void pack();
  void pack_some();
  void pack_tiles();
  void work();

  ThreadPool& threads_;
  const bool tiles_quantized_;
  struct Release {
    void operator()(float* floats) const { ::operator delete[](floats, std::align_val_t{kTileBytes}); }
  };
  std::unique_ptr<float[], Release> packed_;
  std::size_t packed_capacity_ = 0;
  std::vector<std::uint8_t> terms_;  // of pieces in tiles
  // Of the call in progress.
  Isa isa_ = Isa::kGeneric;
  const Matrices* matrices_ = nullptr;
  const Product* products_ = nullptr;
  const float* x_ = nullptr;
  std::size_t num_tokens_ = 0;
  bool in_tiles_ = false;
  std::size_t rows_per_chunk_ = 0;
  std::size_t num_chunks_ = 0;
  alignas(64) std::atomic<std::size_t> next_chunk_{0};
};

// Floats of a token after pack_tokens.
std::size_t packed_width(Isa isa, Number number, std::size_t num_in);

// Copies x [num_tokens, num_in] into the order in which weights of that number are widened, padded with zeros; for
// quantised weights turns it into integers (ops/quant-inl.h).
void pack_tokens(Isa isa, Number number, const float* x, std::size_t num_tokens, std::size_t num_in, float* packed);

// One range in the calling thread.
void multiply_range(Isa isa, const LinearRange& range);

}  // namespace ambidex
