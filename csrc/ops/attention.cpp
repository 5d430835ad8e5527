#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "core/check.h"
#include "simd/call.h"

namespace ambidex {
namespace {

constexpr float kNoKey = -std::numeric_limits<float>::infinity();

// Enough tasks that the last one to finish keeps the others waiting for a sixteenth of the time at most, but none so
// short that its start (packing q, the first cache misses) shows: 256 keys of bf16 and 128 dims take about 10 us.
constexpr std::size_t kTasksPerThread = 16;
constexpr std::size_t kLeastKeys = 256;

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace

// Defined in attention-inl.h.
#define AMBIDEX_DECLARE_ATTENTION(isa)                                                       \
  namespace isa {                                                                            \
  void attend_range(const AttendCall& call, const AttendRange& range, char* workspace);      \
  std::size_t workspace_bytes(const AttendCall& call, std::size_t rows);                     \
  void exp2_each(const float* x, float* y, std::size_t num);                                 \
  }
AMBIDEX_DECLARE_ATTENTION(generic)
AMBIDEX_DECLARE_ATTENTION(avx2)
AMBIDEX_DECLARE_ATTENTION(avx512)
AMBIDEX_DECLARE_ATTENTION(avx512bf16)
AMBIDEX_DECLARE_ATTENTION(amx)
#undef AMBIDEX_DECLARE_ATTENTION

void attend_range(Isa isa, const AttendCall& call, const AttendRange& range, char* workspace) {
  AMBIDEX_CALL(isa, attend_range, call, range, workspace);
}
std::size_t workspace_bytes(Isa isa, const AttendCall& call, std::size_t rows) {
  AMBIDEX_CALL(isa, workspace_bytes, call, rows);
}
void exp2_each(Isa isa, const float* x, float* y, std::size_t num) { AMBIDEX_CALL(isa, exp2_each, x, y, num); }

KeyBatch::KeyBatch(const std::int64_t* block_ids, std::size_t num_block_ids, const std::int64_t* block_offsets,
                   const std::int64_t* first_key, const std::int64_t* num_keys, const std::int64_t* row_offsets,
                   std::size_t num_requests, std::size_t block_size)
    : block_size_(block_size) {
  assign(block_ids, num_block_ids, block_offsets, first_key, num_keys, row_offsets, num_requests);
}

void KeyBatch::assign(const std::int64_t* block_ids, std::size_t num_block_ids, const std::int64_t* block_offsets,
                      const std::int64_t* first_key, const std::int64_t* num_keys, const std::int64_t* row_offsets,
                      std::size_t num_requests) {
  requests_.clear();
  block_positions_.clear();
  row_positions_.clear();
  num_rows_ = num_pool_blocks_ = most_rows_ = 0;
  block_ids_.assign(block_ids, block_ids + num_block_ids);
  for (std::int64_t id : block_ids_) {
    AMBIDEX_CHECK(id >= 0, "block_ids: expected ids from 0 on, got ", id);
    num_pool_blocks_ = std::max(num_pool_blocks_, static_cast<std::size_t>(id) + 1);
  }
  AMBIDEX_CHECK(block_offsets[0] == 0 && row_offsets[0] == 0, "offsets: expected to begin with 0, got ", block_offsets[0],
                " (blocks) and ", row_offsets[0], " (rows)");
  requests_.reserve(num_requests);
  for (std::size_t r = 0; r < num_requests; ++r) {
    const std::int64_t num_blocks = block_offsets[r + 1] - block_offsets[r];
    const std::int64_t rows = row_offsets[r + 1] - row_offsets[r];
    AMBIDEX_CHECK(num_blocks >= 0 && block_offsets[r + 1] <= static_cast<std::int64_t>(num_block_ids),
                  "block_offsets: request ", r, " has ids ", block_offsets[r], " to ", block_offsets[r + 1], " of ",
                  num_block_ids);
    AMBIDEX_CHECK(rows >= 0, "row_offsets: request ", r, " has rows ", row_offsets[r], " to ", row_offsets[r + 1]);
    AMBIDEX_CHECK(first_key[r] >= 0 && num_keys[r] >= 0 &&
                      first_key[r] + num_keys[r] <= num_blocks * static_cast<std::int64_t>(block_size_),
                  "keys of request ", r, ": ", num_keys[r], " from ", first_key[r], " on do not lie in its ", num_blocks,
                  " blocks of ", block_size_);
    requests_.push_back({static_cast<std::size_t>(row_offsets[r]), static_cast<std::size_t>(rows),
                         static_cast<std::size_t>(first_key[r]), static_cast<std::size_t>(num_keys[r]),
                         static_cast<std::size_t>(block_offsets[r])});
    most_rows_ = std::max(most_rows_, static_cast<std::size_t>(rows));
  }
  num_rows_ = static_cast<std::size_t>(row_offsets[num_requests]);
}

void KeyBatch::set_positions(const std::int64_t* of_blocks, std::size_t num_blocks, const std::int64_t* of_rows,
                             std::size_t num_rows) {
  block_positions_.clear();
  row_positions_.clear();
  AMBIDEX_CHECK(num_blocks == block_ids_.size() && num_rows == num_rows_, "positions: expected those of ",
                block_ids_.size(), " blocks and ", num_rows_, " rows, got ", num_blocks, " and ", num_rows);
  block_positions_.assign(of_blocks, of_blocks + num_blocks);
  row_positions_.assign(of_rows, of_rows + num_rows);
}

void AttentionPool::attend(Isa isa, const AttendCall& call, const KeyBatch& batch) {
  std::lock_guard<std::mutex> lock(threads_.mutex());
  plan(call, batch);
  reserve(isa, call, batch);
  call_ = &call;
  isa_ = isa;
  next_task_.store(0, std::memory_order_relaxed);
  const auto work = [](void* self, std::size_t thread) { static_cast<AttentionPool*>(self)->work(thread); };
  if (tasks_.size() == 1) {
    work(this, 0);
  } else if (!tasks_.empty()) {
    threads_.run_shared(work, this);
  }
}

void AttentionPool::plan(const AttendCall& call, const KeyBatch& batch) {
  tasks_.clear();
  joins_.clear();
  num_part_floats_ = 0;
  std::size_t num_keys = 0;
  for (const KeyBatch::Request& request : batch.requests()) num_keys += request.num_rows > 0 ? request.num_keys : 0;
  std::size_t keys_per_task = ceil_div(num_keys * call.num_kv_heads, threads_.num_threads() * kTasksPerThread);
  keys_per_task = ceil_div(std::max(keys_per_task, kLeastKeys), 64) * 64;
  if (threads_.num_threads() == 1) keys_per_task = num_keys + 1;
  for (const KeyBatch::Request& request : batch.requests()) {
    if (request.num_rows == 0) continue;
    for (std::size_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) {
      add_tasks(call, batch, request, kv_head, keys_per_task);
    }
  }
}

void AttentionPool::add_tasks(const AttendCall& call, const KeyBatch& batch, const KeyBatch::Request& request,
                              std::size_t kv_head, std::size_t keys_per_task) {
  const std::size_t num_q_heads = call.num_kv_heads * call.group_size;
  const std::size_t first_query = request.first_row * num_q_heads + kv_head * call.group_size;
  float* out = call.out + first_query * call.head_dim;
  float* lse = call.lse + first_query;
  if (request.num_keys == 0) {
    for (std::size_t t = 0; t < request.num_rows; ++t) {
      std::fill_n(out + t * num_q_heads * call.head_dim, call.group_size * call.head_dim, 0.0f);
      std::fill_n(lse + t * num_q_heads, call.group_size, kNoKey);
    }
    return;
  }
  AttendRange range{batch.block_ids() + request.first_block, kv_head, request.first_row, request.num_rows,
                    request.first_key, request.num_keys, out, lse, num_q_heads};
  if (call.slopes != nullptr) {
    range.block_positions = batch.block_positions() + request.first_block;
    range.row_positions = batch.row_positions();
  }
  const std::size_t num_parts = ceil_div(request.num_keys, keys_per_task);
  if (num_parts == 1) {
    tasks_.push_back({range, kWhole});
    return;
  }
  const std::size_t num_queries = request.num_rows * call.group_size;
  joins_.push_back({num_part_floats_, num_parts, num_queries, out, lse, num_q_heads});
  num_part_floats_ += num_parts * num_queries * (call.head_dim + 1);
  // Cut at multiples of 64 keys of the blocks, so that no tile is read twice.
  const std::size_t end = request.first_key + request.num_keys;
  std::size_t begin = request.first_key;
  for (std::size_t part = 0; part < num_parts; ++part) {
    const std::size_t cut = (request.first_key + request.num_keys * (part + 1) / num_parts) / 64 * 64;
    const std::size_t stop = part + 1 == num_parts ? end : cut;
    range.first_key = begin;
    range.num_keys = stop - begin;
    begin = stop;
    // Where it writes is set in `work`: the memory of the parts is not there yet.
    range.out = nullptr;
    range.first_row = request.first_row;
    range.lse = nullptr;
    range.heads_per_row = part;  // until then
    tasks_.push_back({range, joins_.size() - 1});
  }
}

void AttentionPool::reserve(Isa isa, const AttendCall& call, const KeyBatch& batch) {
  if (parts_.size() < num_part_floats_) parts_.resize(num_part_floats_);
  for (Task& task : tasks_) {
    if (task.join == kWhole) continue;
    const Join& join = joins_[task.join];
    const std::size_t part = task.range.heads_per_row;
    float* outs = parts_.data() + join.first_float;
    task.range.out = outs + part * join.num_queries * call.head_dim;
    task.range.lse = outs + join.num_parts * join.num_queries * call.head_dim + part * join.num_queries;
    task.range.heads_per_row = call.group_size;
  }
  if (num_missing_capacity_ < joins_.size()) {
    num_missing_ = std::make_unique<std::atomic<std::size_t>[]>(joins_.size());
    num_missing_capacity_ = joins_.size();
  }
  for (std::size_t i = 0; i < joins_.size(); ++i) {
    num_missing_[i].store(joins_[i].num_parts, std::memory_order_relaxed);
  }
  workspaces_.resize(threads_.num_threads());
  const std::size_t needed = workspace_bytes(isa, call, batch.most_rows() * call.group_size);
  for (Workspace& workspace : workspaces_) {
    if (workspace.size >= needed) continue;
    workspace.bytes = std::make_unique<char[]>(needed + 64);
    workspace.size = needed;
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.bytes.get());
    workspace.begin = workspace.bytes.get() + (64 - address % 64) % 64;
  }
}

void AttentionPool::work(std::size_t thread) {
  for (;;) {
    const std::size_t i = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (i >= tasks_.size()) return;
    const Task& task = tasks_[i];
    attend_range(isa_, *call_, task.range, workspaces_[thread].begin);
    if (task.join == kWhole) continue;
    if (num_missing_[task.join].fetch_sub(1, std::memory_order_acq_rel) == 1) finish(joins_[task.join]);
  }
}

// out = Σ exp(lse_i - lse) out_i, lse = log Σ exp(lse_i); every part saw a key.
void AttentionPool::finish(const Join& join) const {
  const std::size_t dim = call_->head_dim;
  const float* outs = parts_.data() + join.first_float;
  const float* lses = outs + join.num_parts * join.num_queries * dim;
  for (std::size_t query = 0; query < join.num_queries; ++query) {
    float largest = kNoKey;
    for (std::size_t part = 0; part < join.num_parts; ++part) {
      const float lse = lses[part * join.num_queries + query];
      largest = lse > largest || std::isnan(lse) ? lse : largest;
    }
    float sum = 0.0f;
    for (std::size_t part = 0; part < join.num_parts; ++part) {
      sum += std::exp(lses[part * join.num_queries + query] - largest);
    }
    const std::size_t to = query / call_->group_size * join.heads_per_row + query % call_->group_size;
    float* out = join.out + to * dim;
    std::fill_n(out, dim, 0.0f);
    for (std::size_t part = 0; part < join.num_parts; ++part) {
      const float weight = std::exp(lses[part * join.num_queries + query] - largest) / sum;
      const float* from = outs + (part * join.num_queries + query) * dim;
      for (std::size_t i = 0; i < dim; ++i) out[i] += weight * from[i];
    }
    join.lse[to] = largest + std::log(sum);
  }
}

}  // namespace ambidex
