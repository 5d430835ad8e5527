#include "ops/linear.h"

#include <algorithm>
#include <mutex>

#include "core/check.h"
#include "ops/quant.h"
#include "simd/call.h"

namespace ambidex {
namespace {

// Threads take chunks of rows as they come, so that one which is held up does not keep the others waiting: sixteen for
// each. A chunk of 128 KiB, about 10 us of one thread's reads, hides what taking it costs (0.1 us) and stays in the
// second cache while blocks of tokens go over it. 16 rows of fp32 results are a line: threads do not share lines of y;
// and they are a group of a packed matrix.
constexpr std::size_t kChunksPerThread = 16;
constexpr std::size_t kMostChunkBytes = 128 * 1024;
constexpr std::size_t kRowsPerLine = 16;
constexpr std::size_t kTileChunksPerThread = 8;
static_assert(kRowsPerLine % kGroupRows == 0, "a chunk begins with a group");

// Below this the caller alone is done before another thread has begun: a round of the pool costs about 1 us, in which
// one thread reads about 10 KiB.
constexpr std::size_t kLeastBytesForThreads = 32 * 1024;

// Of x, that a thread packs before it asks for more.
constexpr std::size_t kTokensAtOnce = 4;

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace

// Defined in linear-inl.h.
#define AMBIDEX_DECLARE_LINEAR(isa)                                                                            \
  namespace isa {                                                                                              \
  std::size_t packed_width(Number number, std::size_t num_in);                                                 \
  void pack_tokens(Number number, const float* x, std::size_t num_tokens, std::size_t num_in, float* packed);  \
  void multiply_range(const LinearRange& range);                                                               \
  std::size_t least_tile_tokens(Number number);                                                                \
  void pack_tile_piece(const float* x, std::size_t num_tokens, std::size_t num_in, std::size_t piece, char* packed, \
                       std::uint8_t* num_terms);                                                               \
  void multiply_tile_range(const LinearRange& range);                                                          \
  bool has_quant_tiles(Number number);                                                                         \
  void pack_quant_tile_piece(const float* x, std::size_t num_tokens, std::size_t num_in, std::size_t piece,    \
                             char* packed, std::uint8_t* num_terms);                                           \
  void multiply_quant_tile_range(const LinearRange& range);                                                    \
  }
AMBIDEX_DECLARE_LINEAR(generic)
AMBIDEX_DECLARE_LINEAR(avx2)
AMBIDEX_DECLARE_LINEAR(avx512)
AMBIDEX_DECLARE_LINEAR(avx512bf16)
AMBIDEX_DECLARE_LINEAR(amx)
#undef AMBIDEX_DECLARE_LINEAR

std::size_t packed_width(Isa isa, Number number, std::size_t num_in) { AMBIDEX_CALL(isa, packed_width, number, num_in); }
void pack_tokens(Isa isa, Number number, const float* x, std::size_t num_tokens, std::size_t num_in, float* packed) {
  AMBIDEX_CALL(isa, pack_tokens, number, x, num_tokens, num_in, packed);
}
void multiply_range(Isa isa, const LinearRange& range) {
  if (range.tiles.data != nullptr && is_quantized(range.number)) {
    AMBIDEX_CALL(isa, multiply_quant_tile_range, range);
  } else if (range.tiles.data != nullptr) {
    AMBIDEX_CALL(isa, multiply_tile_range, range);
  } else {
    AMBIDEX_CALL(isa, multiply_range, range);
  }
}
std::size_t least_tile_tokens(Isa isa, Number number) { AMBIDEX_CALL(isa, least_tile_tokens, number); }
bool has_quant_tiles(Isa isa, Number number) { AMBIDEX_CALL(isa, has_quant_tiles, number); }
void pack_tile_piece(Isa isa, Number number, const float* x, std::size_t num_tokens, std::size_t num_in,
                     std::size_t piece, char* packed, std::uint8_t* num_terms) {
  if (is_quantized(number)) {
    AMBIDEX_CALL(isa, pack_quant_tile_piece, x, num_tokens, num_in, piece, packed, num_terms);
  } else {
    AMBIDEX_CALL(isa, pack_tile_piece, x, num_tokens, num_in, piece, packed, num_terms);
  }
}

void LinearPool::multiply(Isa isa, const Matrices& matrices, const float* x, std::size_t num_tokens,
                          const Product* products) {
  AMBIDEX_CHECK(matrices.number != Number::kInt8, "weights: expected fp32, bf16, fp16 or a quantised type, got int8");
  AMBIDEX_CHECK(matrices.num_in % block_of(matrices.number).numbers == 0, "weights: ", matrices.num_in,
                " columns are no whole blocks of ", block_of(matrices.number).numbers);
  std::lock_guard<std::mutex> lock(threads_.mutex());
  in_tiles_ = num_tokens > 0 && (is_quantized(matrices.number)
                                     ? tiles_quantized_ && has_quant_tiles(isa, matrices.number)
                                     : num_tokens >= least_tile_tokens(isa, matrices.number));
  const std::size_t pieces_per_block = tile_pieces(matrices.number, matrices.num_in);
  const std::size_t num_pieces = in_tiles_ ? tile_blocks(num_tokens) * pieces_per_block : 0;
  const std::size_t packed_size = in_tiles_ ? num_pieces * tile_piece_bytes(matrices.number) / sizeof(float)
                                            : num_tokens * packed_width(isa, matrices.number, matrices.num_in);
  if (packed_capacity_ < packed_size) {
    packed_.reset(new (std::align_val_t{kTileBytes}) float[packed_size]);
    packed_capacity_ = packed_size;
  }
  if (terms_.size() < num_pieces) terms_.resize(num_pieces);
  isa_ = isa;
  matrices_ = &matrices;
  products_ = products;
  num_tokens_ = num_tokens;
  x_ = x;
  pack();
  const std::size_t bytes_per_row = std::max<std::size_t>(row_bytes(matrices.number, matrices.num_in), 1);
  std::size_t num_rows = 0;
  for (const Matrix& part : matrices.parts) num_rows += part.num_out;
  const std::size_t even_share = num_rows * bytes_per_row / (threads_.num_threads() * kChunksPerThread);
  if (in_tiles_) {
    // x is read again for each chunk: as many rows as tokens make both reads alike, four times as many rows of 4 bits.
    const std::size_t alike = is_quantized(matrices.number) ? kMostTileRows : tile_blocks(num_tokens) * kTileRows;
    const std::size_t most = std::min(kMostTileRows, alike);
    const std::size_t even_rows = num_rows / (threads_.num_threads() * kTileChunksPerThread) / kTileRows * kTileRows;
    rows_per_chunk_ = std::min(most, std::max(kTileRows, even_rows));
  } else {
    rows_per_chunk_ = ceil_div(std::min(kMostChunkBytes, even_share) / bytes_per_row + 1, kRowsPerLine) * kRowsPerLine;
  }
  num_chunks_ = 0;
  for (const Matrix& part : matrices.parts) num_chunks_ += ceil_div(part.num_out, rows_per_chunk_);
  next_chunk_.store(0, std::memory_order_relaxed);
  if (num_rows * bytes_per_row * num_tokens <= kLeastBytesForThreads) {
    work();
  } else {
    threads_.run_shared([](void* self, std::size_t) { static_cast<LinearPool*>(self)->work(); }, this);
  }
}

// All threads take part where x is as large as what they are woken for.
void LinearPool::pack() {
  next_chunk_.store(0, std::memory_order_relaxed);
  if (num_tokens_ * matrices_->num_in * sizeof(float) <= kLeastBytesForThreads) {
    pack_some();
  } else {
    threads_.run_shared([](void* self, std::size_t) { static_cast<LinearPool*>(self)->pack_some(); }, this);
  }
}

void LinearPool::pack_some() {
  if (in_tiles_) return pack_tiles();
  const std::size_t width = packed_width(isa_, matrices_->number, matrices_->num_in);
  for (std::size_t token; (token = next_chunk_.fetch_add(kTokensAtOnce, std::memory_order_relaxed)) < num_tokens_;) {
    pack_tokens(isa_, matrices_->number, x_ + token * matrices_->num_in, std::min(kTokensAtOnce, num_tokens_ - token),
                matrices_->num_in, packed_.get() + token * width);
  }
}

void LinearPool::pack_tiles() {
  const std::size_t num_pieces = tile_pieces(matrices_->number, matrices_->num_in);
  const std::size_t piece_bytes = tile_piece_bytes(matrices_->number);
  const std::size_t count = tile_blocks(num_tokens_) * num_pieces;
  for (std::size_t idx; (idx = next_chunk_.fetch_add(1, std::memory_order_relaxed)) < count;) {
    const std::size_t token = idx / num_pieces * kTileTokens;
    pack_tile_piece(isa_, matrices_->number, x_ + token * matrices_->num_in,
                    std::min(kTileTokens, num_tokens_ - token), matrices_->num_in, idx % num_pieces,
                    reinterpret_cast<char*>(packed_.get()) + idx * piece_bytes, &terms_[idx]);
  }
}

void LinearPool::work() {
  const std::size_t bytes_per_row = row_bytes(matrices_->number, matrices_->num_in);
  std::size_t part = 0, chunks_before = 0;
  for (std::size_t chunk; (chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed)) < num_chunks_;) {
    std::size_t num_chunks;
    while (chunk >= chunks_before + (num_chunks = ceil_div(matrices_->parts[part].num_out, rows_per_chunk_))) {
      chunks_before += num_chunks;
      ++part;
    }
    const Matrix& matrix = matrices_->parts[part];
    const Product& product = products_[part];
    const std::size_t first_row = (chunk - chunks_before) * rows_per_chunk_;
    const std::size_t num_rows = std::min(rows_per_chunk_, matrix.num_out - first_row);
    multiply_range(isa_, {matrices_->number,
                          static_cast<const char*>(matrix.weight) + first_row * bytes_per_row,
                          matrix.bias == nullptr ? nullptr : matrix.bias + first_row, num_rows, matrices_->num_in,
                          packed_.get(),
                          in_tiles_ ? TokenTiles{reinterpret_cast<const char*>(packed_.get()), terms_.data()}
                                    : TokenTiles{nullptr, nullptr},
                          num_tokens_, product.y + first_row,
                          product.residual == nullptr ? nullptr : product.residual + first_row, matrix.num_out});
  }
}

}  // namespace ambidex
