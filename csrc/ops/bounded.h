// attend_bounded: attention that leaves out the keys that hardly count and knows what that costs (docs/bounded.md).
//
//   scan     all keys, 8-bit products with the true query: an upper score u_j >= q·k_j · scale of each
//   choose   per query head, the threshold below which exp(u_j) sums up to at most the asked share of the softmax
//   keep     keys that some head of the group keeps: exact scores, softmax, V; nothing else of K and V is read
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/aligned.h"
#include "core/number.h"
#include "core/pool.h"
#include "ops/attention.h"
#include "ops/kv_tiles.h"
#include "simd/isa.h"

namespace ambidex {

// What is reported of each query head; see BoundedCall::figures.
enum BoundedFigure : std::size_t { kDroppedMass, kErrorShare, kValueNorm, kOutNorm, kNumKept, kNumBoundedFigures };

// What benchmarks vary.
struct BoundedTuning {
  std::size_t scan_far_bytes = 16384;  // ahead of the keys that are multiplied
  bool is_near_fetched_late = false;   // with tiles: while codes are counted, not while keys are multiplied
  std::size_t code_pieces_ahead = 4;   // whose lines are fetched before they are written; 0: none
  std::size_t keep_far_keys = 40, keep_near_keys = 8;
  bool is_keep_fetch_spread = true;  // over the products of 16 keys
};

struct BoundedCall {
  // Queries, and the keys as they are scanned: number is int8. Its v is that of `v` below; out [T, Hq, D] and lse
  // [T, Hq] are written.
  AttendCall scan;
  // K and V, row after row: [Hkv, N, P, 2, padded_dim]; null: both are int8, and the scanned keys are K.
  const char* rows;
  Number v_number;  // of v, and of rows
  KVTiles v_tiles;
  const char* v;          // [Hkv, N, record]; int8 only, as v_scales
  const float* v_scales;
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
  // [N]: keys of each block that were kept, of all KV heads, are added; null: nobody counts them.
  std::int32_t* kept_of_block;
  BoundedTuning tuning;
};

// Upper scores are kept as codes: whole eighths of a factor of 2, rounded down. A row's codes are counted by their low byte,
// those of them that are farther below its largest than bytes can tell as the farthest that is not.
constexpr std::size_t kCodesPerUnit = 8;
constexpr std::size_t kNumCounts = 256;
constexpr std::size_t kMostKeysOfTask = 32768;  // counts are 16-bit numbers
// Scores that may lie beyond this many units are not scanned: the row keeps all of its keys.
constexpr float kMostUnits = 4000.0f;

// Codes of a range of keys [pieces of 64 keys, rows, 64], and scores likewise; keys are counted from `base`, a multiple of
// 64.
struct ScanRange {
  AttendRange keys;
  std::size_t base;
  std::int16_t* codes;
  float* scores;              // in units of log2; null: nobody wants them
  std::int32_t* tops;         // [rows]: largest code
  float* lowers;              // [rows]: Σ 2^(score - what it may be off by - top), at most; NaN: all keys must be kept
  float* shifts;              // [rows]: what a score is off by whatever the key, in units of log2
  std::uint16_t* counts;      // [rows, kNumCounts]
  float* value_norm;
};

struct KeepRange {
  AttendRange keys;
  std::size_t base;
  const std::int16_t* codes;
  const float* scores;             // where K itself is what was scanned
  const std::int32_t* thresholds;  // [rows]: keys of which some row's code is not below go in
  const std::int32_t* tops;        // [rows]: largest code of all ranges
  const float* weights;            // [kNumCounts]: what a key counts, by how far it lies below the top
  float *outs, *tops_kept, *sums;  // [rows, padded_dim] not divided by sums; [rows]: largest score; Σ 2^(score - largest)
  float* spared;                   // [rows]: weights of keys below the row's threshold that another row kept
  float* num_kept;
};

// The ops of an instruction set; all three in the calling thread, the workspace aligned to 64 bytes.
struct BoundedForm {
  void (*scan)(const BoundedCall& call, const ScanRange& range, char* workspace);
  void (*keep)(const BoundedCall& call, const KeepRange& range, char* workspace);
  std::size_t (*workspace_bytes)(const BoundedCall& call, std::size_t rows);
};

BoundedForm bounded_form(Isa isa);

// What a call spends its threads' time on.
enum BoundedPhase : std::size_t { kScanning, kChoosing, kKeeping, kWaiting, kNumBoundedPhases };

// The memory that bounded attention keeps from call to call, and the threads that it shares with other ops.
class BoundedPool {
 public:
  explicit BoundedPool(ThreadPool& threads) : threads_(threads) {}

  ThreadPool& threads() { return threads_; }
  BoundedTuning& tuning() { return tuning_; }  // that callers may put into their calls

  // Every query of a request sees all of its visible keys, or all but those that hold at most max_mass of its softmax.
  // Two calls at a time run one after the other. Allocates only when a call is larger than every one before it.
  void attend(const BoundedForm& form, const BoundedCall& call, const KeyBatch& batch);

  // Seconds of all threads since the last time that it was asked, by phase; not while a call runs.
  std::array<double, kNumBoundedPhases> take_phase_seconds();

 private:
  // One request and KV head.
  struct Group {
    KeyBatch::Request request;
    std::size_t kv_head, rows, base, num_pieces;
    std::size_t num_parts;   // that it is cut into
    std::size_t first_code;  // in codes_, scores_
    std::size_t first_byte;  // in places_
    const std::int64_t* block_ids;
  };
  // A part of a group: it is scanned, and kept from.
  struct Task {
    std::size_t group, part, first_key, num_keys;
  };
  // Whether somebody has begun.
  struct Claim {
    std::atomic<bool> is_scanned, is_kept;
  };
  struct Progress {
    std::atomic<std::size_t> num_unscanned, num_unkept;
    std::atomic<bool> is_chosen;
  };
  struct alignas(kLineBytes) Workspace {
    AlignedArray<char> bytes;
    std::array<std::chrono::steady_clock::duration, kNumBoundedPhases> spent{};
  };
  // Places of a group's numbers, each [rows] or [parts, rows].
  struct Places {
    std::int32_t* tops;                             // by part, as scanned
    float *lowers, *shifts, *value_norms;
    std::uint16_t* counts;                          // [parts, rows, kNumCounts]
    std::int32_t *all_tops, *thresholds;            // by row
    float *others, *dropped;
    float *outs, *tops_kept, *sums, *spared, *num_kept;  // by part, as kept
    std::size_t num_bytes;
  };

  void reserve(const BoundedForm& form, const BoundedCall& call, const KeyBatch& batch);
  void plan(const BoundedCall& call, const KeyBatch& batch);
  std::size_t count_parts(std::size_t num_keys) const;
  void deal(std::size_t first, std::size_t last);
  void run_wave(std::size_t first, std::size_t last);
  void work(std::size_t thread);
  void try_scan(std::size_t owner, std::size_t i, std::size_t thread);
  void try_keep(std::size_t owner, std::size_t i, std::size_t thread);
  bool is_chosen(std::size_t owner, std::size_t i) const;
  const Task& task(std::size_t owner, std::size_t i) const { return tasks_[first_tasks_[owner] + i]; }
  Claim& claim(std::size_t owner, std::size_t i) const { return claims_.data()[owner * claims_of_owner_ + i]; }
  void scan(const Task& task, std::size_t thread);
  void keep(const Task& task, std::size_t thread);
  void choose(const Group& group);
  void find_threshold(const Group& group, const Places& at, std::size_t row, float limit) const;
  void write(const Group& group);
  void write_row(const Group& group, const Places& at, std::size_t row, float num_kept, float value_norm);
  Places places(const Group& group, char* base) const;
  AttendRange range_of(const Group& group, const Task& task) const;
  bool wait_other() const;
  std::size_t place_of(const Group& group, std::size_t row) const;
  void answer_empty(const BoundedCall& call, const KeyBatch::Request& request) const;

  ThreadPool& threads_;
  BoundedTuning tuning_;
  std::vector<Group> groups_;
  // Of a wave: those of a thread lie side by side, in the order of groups.
  std::vector<Task> tasks_;
  std::vector<std::size_t> first_tasks_;  // [threads + 1]
  AlignedArray<Claim> claims_;            // [threads, claims_of_owner_]
  std::size_t claims_of_owner_ = 0;
  AlignedArray<std::int16_t> codes_;
  AlignedArray<float> scores_;
  AlignedArray<char> places_;
  std::unique_ptr<Progress[]> progress_;  // by group of a wave
  std::size_t progress_capacity_ = 0;
  std::vector<Workspace> workspaces_;  // by thread
  // Of the call in progress, and of its wave.
  const BoundedCall* call_ = nullptr;
  BoundedForm form_{};
  std::size_t keys_per_part_ = 0;
  std::size_t first_group_ = 0;
};

}  // namespace ambidex
