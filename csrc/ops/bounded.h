// attend_bounded: attention that leaves out the keys that hardly count and knows what that costs (docs/bounded.md).
//
//   scan     all keys, 8-bit products with the true query: an upper score u_j >= q·k_j · scale of each
//   choose   per query head, the threshold below which exp(u_j) sums up to at most the asked share of the softmax
//   keep     keys that some head of the group keeps: exact scores, softmax, V; nothing else of K and V is read
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/number.h"
#include "core/pool.h"
#include "ops/attention.h"
#include "ops/kv_tiles.h"
#include "simd/isa.h"

namespace ambidex {

// What is reported of each query head; see BoundedCall::figures.
enum BoundedFigure : std::size_t { kDroppedMass, kErrorShare, kValueNorm, kOutNorm, kNumKept, kNumBoundedFigures };

struct BoundedCall {
  // Queries, and the keys as they are scanned: number is int8. Its v is that of `v` below; out [T, Hq, D] and lse
  // [T, Hq] are written.
  AttendCall scan;
  // K itself, row after row: [Hkv, N, P, padded_dim]; null: the scanned keys are K.
  const char* rows;
  Number v_number;  // of v, and of rows
  KVTiles v_tiles;
  const char* v;          // [Hkv, N, record]
  const float* v_scales;  // int8 only
  const float* norms;     // [Hkv, N, 2]: no row of K as it is scanned, and none of V, is longer in the block
  float max_mass;         // 0 … 1: share of the softmax that may be left out
  // What the queries saw of other keys, [T, Hq, D] and [T, Hq]: it counts in the softmax, and is joined with the answer.
  // Both may be null; they may lie where the answer goes.
  const float* near_out;
  const float* near_lse;
  // What they saw elsewhere, [T, Hq], which counts and is not joined; null: nothing. It is there once the word is not 0,
  // which is waited for; half a second later it does not count.
  const float* other_lse;
  const std::int32_t* other_word;
  // [T, Hq, kNumBoundedFigures]: the share of the softmax left out, at most; the factor of the distance from the whole
  // answer to a value that bounds the answer's error; the longest value; the length of `out`, which may be a part of the
  // answer; keys kept of this head's group. Error: at most share · (longest value + length of the whole answer).
  float* figures;
};

// The queries of a request and KV head over a range of its keys. `upper` [rows, stride]: of key i at i - base, which is a
// multiple of 64; units of log2.
struct ScanRange {
  AttendRange keys;
  float* upper;
  std::size_t base, stride;
  float *tops, *uppers, *lowers, *shifts;  // [rows]: largest upper score, Σ 2^(u - top), the same of lower scores, at most
  float* value_norm;
};

struct KeepRange {
  AttendRange keys;
  const float* upper;
  std::size_t base, stride;
  const float* thresholds;  // [rows]: keys of which some row's upper score is not below go in
  const float* before;      // [rows], or null: but not those that went in with these
  const float* anchors;     // [rows]
  float *outs, *tops, *sums, *kept;  // [rows, padded_dim] not divided by sums; [rows]; kept: Σ 2^(u - anchor)
  float* num_kept;
};

// The ops of an instruction set; all three in the calling thread, the workspace aligned to 64 bytes.
struct BoundedForm {
  void (*scan)(const BoundedCall& call, const ScanRange& range, char* workspace);
  void (*keep)(const BoundedCall& call, const KeepRange& range, char* workspace);
  std::size_t (*workspace_bytes)(const BoundedCall& call, std::size_t rows);
};

BoundedForm bounded_form(Isa isa);

// The memory that bounded attention keeps from call to call, and the threads that it shares with other ops.
class BoundedPool {
 public:
  explicit BoundedPool(ThreadPool& threads) : threads_(threads) {}

  ThreadPool& threads() { return threads_; }

  // Every query of a request sees all of its visible keys, or all but those that hold at most max_mass of its softmax.
  // Two calls at a time run one after the other. Allocates only when a call is larger than every one before it.
  void attend(const BoundedForm& form, const BoundedCall& call, const KeyBatch& batch);

 private:
  // One request and KV head.
  struct Group {
    KeyBatch::Request request;
    std::size_t kv_head, rows, base, stride;
    std::size_t first_task, num_tasks;
    std::size_t first_score;              // in scores_
    std::size_t first_float;              // in floats_
    const std::int64_t* block_ids;
  };
  struct Task {
    std::size_t group, part;
    std::size_t first_key, num_keys;
  };
  struct Progress {
    std::atomic<std::size_t> num_unscanned, num_unkept;
    std::atomic<bool> is_chosen;
  };
  struct Workspace {
    std::unique_ptr<char[]> bytes;
    std::size_t size = 0;
    char* begin = nullptr;  // aligned to 64 bytes
  };
  // Places of a group's numbers, each [rows] or [parts, rows].
  struct Places {
    float *tops, *uppers, *lowers, *shifts, *value_norms, *counts;    // by scanned part; counts by bin, too
    float *anchors, *others, *limits, *thresholds, *before;             // by row
    float *outs, *keep_tops, *sums, *kept, *num_kept;                 // by kept part
    std::size_t num_floats;
  };

  void plan(const BoundedCall& call, const KeyBatch& batch);
  void run_wave();
  void work(std::size_t thread);
  void scan(const Task& task, std::size_t thread);
  void keep(const Task& task, std::size_t thread);
  void choose(const Group& group);
  void finish(const Group& group, std::size_t thread);
  void write(const Group& group, std::size_t num_parts);
  Places places(const Group& group, float* base) const;
  AttendRange range_of(const Group& group) const;
  KeepRange keep_range(const Group& group, const Places& at, std::size_t part) const;
  float find_threshold(const Group& group, const Places& at, std::size_t row) const;
  bool wait_other() const;
  std::size_t place_of(const Group& group, std::size_t row) const;
  void answer_empty(const BoundedCall& call, const KeyBatch::Request& request) const;

  ThreadPool& threads_;
  std::vector<Group> groups_;
  std::vector<Task> tasks_;
  std::vector<float> scores_, floats_;
  std::unique_ptr<Progress[]> progress_;  // by group
  std::size_t progress_capacity_ = 0;
  std::vector<Workspace> workspaces_;  // by thread
  // Of the call in progress, and of its wave.
  const BoundedCall* call_ = nullptr;
  BoundedForm form_{};
  std::size_t first_group_ = 0, num_groups_ = 0, num_tasks_ = 0;
  alignas(64) std::atomic<std::size_t> next_{0};
};

}  // namespace ambidex
