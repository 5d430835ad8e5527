// attend_blocks: partial attention (out, lse) of a ragged batch over keys in one layer of a tiled pool.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/number.h"
#include "core/pool.h"
#include "ops/kv_tiles.h"
#include "simd/isa.h"

namespace ambidex {

// Which keys each request of a step sees, the same for all layers with one window: checked and copied once.
class KeyBatch {
 public:
  struct Request {
    std::size_t first_row, num_rows;  // its queries
    std::size_t first_key, num_keys;  // visible rows of its blocks, side by side
    std::size_t first_block;          // where its block ids begin
  };

  // block_offsets, row_offsets: [R + 1]. first_key, num_keys: [R]. Request r has the blocks
  // block_ids[block_offsets[r] : block_offsets[r + 1]] and the queries row_offsets[r] … row_offsets[r + 1] - 1.
  // Throws std::invalid_argument where they do not fit each other.
  KeyBatch(const std::int64_t* block_ids, std::size_t num_block_ids, const std::int64_t* block_offsets,
           const std::int64_t* first_key, const std::int64_t* num_keys, const std::int64_t* row_offsets,
           std::size_t num_requests, std::size_t block_size);

  // Where keys and queries stand in their contexts, for scores that fall with distance: of the first token of each block
  // id, and of each row; after a throw there are none. Other keys have none until they are given again.
  void set_positions(const std::int64_t* of_blocks, std::size_t num_blocks, const std::int64_t* of_rows,
                     std::size_t num_rows);

  // Other keys of blocks of the same size. After a throw it has none and fits no queries.
  void assign(const std::int64_t* block_ids, std::size_t num_block_ids, const std::int64_t* block_offsets,
              const std::int64_t* first_key, const std::int64_t* num_keys, const std::int64_t* row_offsets,
              std::size_t num_requests);

  const std::vector<Request>& requests() const { return requests_; }
  const std::int64_t* block_ids() const { return block_ids_.data(); }
  std::size_t num_rows() const { return num_rows_; }
  std::size_t block_size() const { return block_size_; }
  std::size_t num_pool_blocks() const { return num_pool_blocks_; }  // the largest block id and one
  std::size_t most_rows() const { return most_rows_; }              // of a request
  bool has_positions() const { return row_positions_.size() == num_rows_ && num_rows_ > 0; }
  const std::int64_t* block_positions() const { return block_positions_.data(); }
  const std::int64_t* row_positions() const { return row_positions_.data(); }

 private:
  std::vector<std::int64_t> block_ids_;
  std::vector<std::int64_t> block_positions_, row_positions_;
  std::vector<Request> requests_;
  std::size_t num_rows_ = 0;
  std::size_t block_size_;
  std::size_t num_pool_blocks_ = 0;
  std::size_t most_rows_ = 0;
};

struct AttendCall {
  Number number;            // of the pool; kInt8 where K or V is packed, too: that is what it is unpacked to
  const char* k;            // [Hkv, N, record]
  const char* v;            // likewise
  const float* k_scales;    // [Hkv, N, P], int8 only: row = scale * integers; packed: [Hkv, N, W, P] (ops/kv_int4.h)
  const float* v_scales;    // likewise
  bool is_k_packed;         // 4-bit numbers
  bool is_v_packed;
  KVTiles tiles;            // of parts that are not packed, and of packed ones as they are unpacked
  std::size_t num_kv_heads, num_blocks;
  Number q_number;
  std::size_t num_rows;     // T
  const void* q;            // [T, Hq, D]
  std::size_t group_size, head_dim;  // Hq = Hkv * group_size
  float scale;
  const float* slopes;      // [Hq] or null: score = scale * q·k - slope * (position of q - position of k)
  float* out;               // [T, Hq, D]
  float* lse;               // [T, Hq], natural log
};

// The queries of a request and KV head over a range of its keys.
struct AttendRange {
  const std::int64_t* block_ids;
  std::size_t kv_head;
  std::size_t first_row, num_rows;
  std::size_t first_key, num_keys;  // num_keys >= 1
  float* out;                       // query (t, g) goes to out + (t * heads_per_row + g) * D
  float* lse;
  std::size_t heads_per_row;
  // With slopes only: of the first token of each of block_ids, and of the rows of the batch from row 0 on.
  const std::int64_t* block_positions = nullptr;
  const std::int64_t* row_positions = nullptr;
};

// The memory that attention keeps from call to call, and the threads that it shares with other ops.
class AttentionPool {
 public:
  explicit AttentionPool(ThreadPool& threads) : threads_(threads) {}

  ThreadPool& threads() { return threads_; }

  // Every query of a request sees all of its visible keys. Where there is none, out is 0 and lse -inf. Each visible K
  // and V row is read once, for all query heads of its group and all queries of its request. Rows that are not
  // visible may hold anything, NaN included. Two calls at a time run one after the other. Allocates only when a call
  // is larger than every one before it.
  void attend(Isa isa, const AttendCall& call, const KeyBatch& batch);

 private:
  struct Task {
    AttendRange range;
    std::size_t join;  // an index, or kWhole
  };
  // One request and KV head whose keys are split: the thread that finishes last merges the parts.
  struct Join {
    std::size_t first_float, num_parts, num_queries;  // in parts_: the outs of all parts, then their lses
    float *out, *lse;
    std::size_t heads_per_row;
  };
  struct Workspace {
    std::unique_ptr<char[]> bytes;
    std::size_t size = 0;
    char* begin = nullptr;  // aligned to 64 bytes
  };
  static constexpr std::size_t kWhole = static_cast<std::size_t>(-1);

  void plan(const AttendCall& call, const KeyBatch& batch);
  void add_tasks(const AttendCall& call, const KeyBatch& batch, const KeyBatch::Request& request, std::size_t kv_head,
                 std::size_t keys_per_task);
  void reserve(Isa isa, const AttendCall& call, const KeyBatch& batch);
  void work(std::size_t thread);
  void finish(const Join& join) const;

  ThreadPool& threads_;
  std::vector<Task> tasks_;
  std::vector<Join> joins_;
  std::size_t num_part_floats_ = 0;
  std::vector<float> parts_;
  std::unique_ptr<std::atomic<std::size_t>[]> num_missing_;  // parts, by join
  std::size_t num_missing_capacity_ = 0;
  std::vector<Workspace> workspaces_;  // by thread
  // Of the call in progress.
  const AttendCall* call_ = nullptr;
  Isa isa_ = Isa::kGeneric;
  alignas(64) std::atomic<std::size_t> next_task_{0};
};

// Bytes that attend_range needs for `rows` queries and heads, and one range in the calling thread; the workspace is
// aligned to 64 bytes.
std::size_t workspace_bytes(Isa isa, const AttendCall& call, std::size_t rows);
void attend_range(Isa isa, const AttendCall& call, const AttendRange& range, char* workspace);

// exp2 of each number, as the kernels compute it; for tests.
void exp2_each(Isa isa, const float* x, float* y, std::size_t num);

}  // namespace ambidex
