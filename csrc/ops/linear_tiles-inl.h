// linear of bf16 weights in AMX tiles, compiled once per instruction set; without tiles it is not there.
//
// A tile's left operand is 16 rows of W times 32 numbers, as they lie in memory; its right one 32 numbers of 16 tokens.
// Products of bf16 are exact and sums fp32. x keeps its 24 bits: what is not bf16 already is cut into three terms of 8
// bits each, x = high + middle + low, that meet the same weights one after the other. So a token's result does not depend
// on the tokens beside it, and is as near to the exact one as a sum in fp32.
#pragma once

#include <string.h>

#include "ops/linear.h"
#include "simd/tiles.h"

namespace ambidex::AMBIDEX_ISA {

#if defined(AMBIDEX_EMULATE_TILES) || defined(__AMX_BF16__)

std::size_t least_tile_tokens(Number number) { return number == Number::kBf16 ? 1 : SIZE_MAX; }

// A number's three terms; an infinite or undefined one has a single term.
inline void split_terms(float x, uint32_t (&terms)[kMostTerms]) {
  const uint32_t bits = float_to_bits(x);
  terms[0] = bits >> 16;
  terms[1] = terms[2] = 0;
  if ((bits & 0xffffu) == 0) return;
  if ((bits & 0x7f800000u) == 0x7f800000u) {
    terms[0] |= 0x40u;  // undefined; its last bits are cut off
    return;
  }
  const float rest = x - bits_to_float(bits & 0xffff0000u);
  const uint32_t rest_bits = float_to_bits(rest);
  terms[1] = rest_bits >> 16;
  terms[2] = float_to_bits(rest - bits_to_float(rest_bits & 0xffff0000u)) >> 16;
}

void pack_tile_piece(const float* x, std::size_t num_tokens, std::size_t num_in, std::size_t piece, char* packed,
                     uint8_t* num_terms) {
  const std::size_t begin = piece * kPieceNumbers;
  const std::size_t end = begin + kPieceNumbers < num_in ? begin + kPieceNumbers : num_in;
  uint32_t any = 0;
  for (std::size_t t = 0; t < num_tokens; ++t) {
    for (std::size_t k = begin; k < end; ++k) any |= float_to_bits(x[t * num_in + k]);
  }
  const std::size_t terms = (any & 0xffffu) == 0 ? 1 : kMostTerms;
  *num_terms = static_cast<uint8_t>(terms);
  if (num_tokens < kTileTokens || end - begin < kPieceNumbers) memset(packed, 0, terms * kPieceBytes);
  for (std::size_t t = 0; t < num_tokens; ++t) {
    const float* row = x + t * num_in;
    char* const lane = packed + 4 * t;
    for (std::size_t k = begin; k < end; k += 2) {
      char* const to = lane + (k - begin) / 2 * kTileTokens * 4;
      if (terms == 1) {
        const uint32_t high = k + 1 < end ? float_to_bits(row[k + 1]) : 0;
        const uint32_t pair = float_to_bits(row[k]) >> 16 | high;
        memcpy(to, &pair, sizeof pair);
        continue;
      }
      uint32_t first[kMostTerms], second[kMostTerms] = {};
      split_terms(row[k], first);
      if (k + 1 < end) split_terms(row[k + 1], second);
      for (std::size_t i = 0; i < terms; ++i) {
        const uint32_t pair = first[i] | second[i] << 16;
        memcpy(to + i * kPieceBytes, &pair, sizeof pair);
      }
    }
  }
}

// Tokens whose sums stay in tiles while the rows of a group pass, and tokens of a range that are summed at a time.
constexpr std::size_t kTileBlocks = 4;
constexpr std::size_t kMostRangeBlocks = 8;

// Of x, that is read again and again from the second cache.
constexpr std::size_t kPanelBytes = 1 << 20;

// How far ahead of the products the rows' lines are asked for: 16 KiB, which one core reads in 2 us.
constexpr std::size_t kTilesAhead = 16;

constexpr std::size_t kTileFloats = kTileRows * kTileTokens;

// Adds a panel of pieces to the sums of a group of rows and kCount blocks of tokens.
struct TilePanel {
  const char* weights;   // of the group's first row, at the panel's first number
  std::size_t stride;    // bytes from row to row
  std::size_t num_rows;
  const char* after;     // rows that come next, of which the first lines are fetched; or null
  const char* x;         // of the first block, at the panel's first piece
  const uint8_t* terms;  // likewise
  std::size_t block_pieces;  // from block to block
  std::size_t num_in;    // of the panel
  float* sums;           // [kCount][16 rows][16 tokens]
  bool add;              // to what is there
};

template <std::size_t kBlock, std::size_t kCount>
inline void add_tile_products(Tiles& tiles, const TilePanel& panel, std::size_t piece, std::size_t at) {
  if constexpr (kBlock < kCount) {
    const std::size_t idx = kBlock * panel.block_pieces + piece;
    const char* from = panel.x + idx * kMostTerms * kPieceBytes + at;
    for (std::size_t term = 0; term < panel.terms[idx]; ++term, from += kPieceBytes) {
      tiles.load<kRight + kBlock % 2>(from, 64);
      tiles.add_bf16_product<kSum + kBlock, kLeft, kRight + kBlock % 2>();
    }
    add_tile_products<kBlock + 1, kCount>(tiles, panel, piece, at);
  }
}

template <std::size_t kBlock, std::size_t kCount, bool kStore>
inline void move_sums(Tiles& tiles, const TilePanel& panel) {
  if constexpr (kBlock < kCount) {
    float* const at = panel.sums + kBlock * kTileFloats;
    if (kStore) {
      tiles.store<kSum + kBlock>(at, 64);
    } else if (panel.add) {
      tiles.load<kSum + kBlock>(at, 64);
    } else {
      tiles.zero<kSum + kBlock>();
    }
    move_sums<kBlock + 1, kCount, kStore>(tiles, panel);
  }
}

template <std::size_t kCount>
void add_panel(Tiles& tiles, const TilePanel& panel, bool fetches) {
  move_sums<0, kCount, false>(tiles, panel);
  const std::size_t num_whole = panel.num_in / kTileNumbers;
  for (std::size_t tile = 0; tile < num_whole; ++tile) {
    const char* const left = panel.weights + tile * kTileBytes;
    if (fetches) {
      const char* const ahead = tile + kTilesAhead < num_whole ? left + kTilesAhead * kTileBytes
                                : panel.after != nullptr ? panel.after + (tile + kTilesAhead - num_whole) * kTileBytes
                                                         : nullptr;
      if (ahead != nullptr) {
        for (std::size_t row = 0; row < panel.num_rows; ++row) prefetch_to_l2(ahead + row * panel.stride);
      }
    }
    tiles.load<kLeft>(left, panel.stride);
    add_tile_products<0, kCount>(tiles, panel, tile / kPieceTiles, tile % kPieceTiles * kTileTokens * kTileBytes);
  }
  const std::size_t rest = panel.num_in - num_whole * kTileNumbers;
  if (rest > 0) {
    alignas(64) char rows[kTileRows * kTileBytes] = {};
    for (std::size_t row = 0; row < panel.num_rows; ++row) {
      memcpy(rows + row * kTileBytes, panel.weights + row * panel.stride + num_whole * kTileBytes, rest * sizeof(Bf16));
    }
    tiles.load<kLeft>(rows, kTileBytes);
    add_tile_products<0, kCount>(tiles, panel, num_whole / kPieceTiles,
                                 num_whole % kPieceTiles * kTileTokens * kTileBytes);
  }
  move_sums<0, kCount, true>(tiles, panel);
}

inline void add_panel(Tiles& tiles, const TilePanel& panel, std::size_t num_blocks, bool fetches) {
  switch (num_blocks) {
    case 1:
      return add_panel<1>(tiles, panel, fetches);
    case 2:
      return add_panel<2>(tiles, panel, fetches);
    case 3:
      return add_panel<3>(tiles, panel, fetches);
    default:
      return add_panel<4>(tiles, panel, fetches);
  }
}

// Sums [16 rows][16 tokens] to y, with what is added to them.
inline void finish_tile(const LinearRange& range, std::size_t first_row, std::size_t num_rows, std::size_t first_token,
                        std::size_t num_tokens, const float* sums) {
  for (std::size_t t = 0; t < num_tokens; ++t) {
    const std::size_t at = (first_token + t) * range.y_stride + first_row;
    for (std::size_t r = 0; r < num_rows; ++r) {
      float y = sums[r * kTileTokens + t];
      if (range.bias != nullptr) y += range.bias[first_row + r];
      if (range.residual != nullptr) y += range.residual[at + r];
      range.y[at + r] = y;
    }
  }
}

// The range's rows times the tokens of blocks first_block … first_block + num_blocks - 1. Panels of x come first, rows
// inside, so that a panel stays in the second cache while all rows of the range meet it.
inline void multiply_tile_blocks(Tiles& tiles, const LinearRange& range, std::size_t first_block, std::size_t num_blocks) {
  alignas(64) float sums[kMostTileRows / kTileRows][kMostRangeBlocks][kTileFloats];
  const std::size_t num_pieces = tile_pieces(range.num_in), row_stride = range.num_in * sizeof(Bf16);
  const std::size_t whole = num_blocks * kPieceBytes;
  const std::size_t panel_pieces = kPanelBytes / whole == 0 ? 1 : kPanelBytes / whole;
  const char* const weights = static_cast<const char*>(range.weight);
  for (std::size_t piece = 0; piece < num_pieces; piece += panel_pieces) {
    const std::size_t from = piece * kPieceNumbers;
    const std::size_t upto = from + panel_pieces * kPieceNumbers;
    for (std::size_t row = 0; row < range.num_rows; row += kTileRows) {
      const std::size_t num_rows = range.num_rows - row < kTileRows ? range.num_rows - row : kTileRows;
      tiles.configure({num_rows, kTileLines});
      const char* const group = weights + row * row_stride + from * sizeof(Bf16);
      const bool has_next = row + 2 * kTileRows <= range.num_rows;  // a whole group of rows
      for (std::size_t block = 0; block < num_blocks; block += kTileBlocks) {
        const std::size_t idx = (first_block + block) * num_pieces + piece;
        const TilePanel panel{group,
                              row_stride,
                              num_rows,
                              has_next ? group + kTileRows * row_stride : nullptr,
                              range.tiles.data + idx * kMostTerms * kPieceBytes,
                              range.tiles.terms + idx,
                              num_pieces,
                              (upto < range.num_in ? upto : range.num_in) - from,
                              sums[row / kTileRows][block],
                              piece > 0};
        const std::size_t some = num_blocks - block < kTileBlocks ? num_blocks - block : kTileBlocks;
        add_panel(tiles, panel, some, block == 0);
      }
    }
  }
  for (std::size_t row = 0; row < range.num_rows; row += kTileRows) {
    const std::size_t num_rows = range.num_rows - row < kTileRows ? range.num_rows - row : kTileRows;
    for (std::size_t block = 0; block < num_blocks; ++block) {
      const std::size_t token = (first_block + block) * kTileTokens;
      const std::size_t some = range.num_tokens - token < kTileTokens ? range.num_tokens - token : kTileTokens;
      finish_tile(range, row, num_rows, token, some, sums[row / kTileRows][block]);
    }
  }
}

void multiply_tile_range(const LinearRange& range) {
  Tiles tiles;
  const std::size_t num_blocks = tile_blocks(range.num_tokens);
  for (std::size_t block = 0; block < num_blocks; block += kMostRangeBlocks) {
    const std::size_t some = num_blocks - block < kMostRangeBlocks ? num_blocks - block : kMostRangeBlocks;
    multiply_tile_blocks(tiles, range, block, some);
  }
}

#else

std::size_t least_tile_tokens(Number) { return SIZE_MAX; }
void pack_tile_piece(const float*, std::size_t, std::size_t, std::size_t, char*, uint8_t*) {}
void multiply_tile_range(const LinearRange&) {}

#endif

}  // namespace ambidex::AMBIDEX_ISA
