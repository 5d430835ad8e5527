// Scores of a query over keys that lie row after row, for policies that choose keys by them:
//
//   scores[h][g][j] = scale * q[h * G + g] · k[h][j]       products and sums fp32
//
// What it costs is reading K once: rows are read in their order, by all threads, each row for all query heads of its
// group.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "core/number.h"
#include "core/pool.h"
#include "simd/isa.h"

namespace ambidex {

// The queries of one token and the keys of its request.
struct ScoreCall {
  const void* q;  // [num_kv_heads * group_size, head_dim]
  const void* k;  // [num_kv_heads, capacity, head_dim], the first num_keys rows of each head being read
  std::size_t capacity, num_keys;
  void* scores;  // [num_kv_heads, group_size, num_keys]
};

// What the calls of a step have in common. Numbers: fp32, bf16 or fp16.
struct ScoreForm {
  Number q_number, number, scores_number;
  std::size_t num_kv_heads, group_size, head_dim;
  float scale;
};

// Some rows of one head, scored in the calling thread. `q`: [group_size, padded_dim], in the order of lay_out_scored.
struct ScoreRange {
  Number number, scores_number;
  const char* rows;
  std::size_t num_rows, head_dim, group_size;
  const float* q;
  char* scores;              // of the first row for the first query head
  std::size_t scores_stride;  // bytes from one query head to the next
};
void score_range(Isa isa, const ScoreRange& range);

// A query as fp32 times scale, in the order in which rows of `number` are widened (simd/dot.h), zeros up to padded_dim.
constexpr std::size_t kScoreStep = 32;
constexpr std::size_t padded_to_step(std::size_t head_dim) {
  return (head_dim + kScoreStep - 1) / kScoreStep * kScoreStep;
}
void lay_out_scored(Isa isa, Number number, Number q_number, const void* q, std::size_t head_dim, float scale, float* to);

// The threads, which share out runs of rows among themselves.
class ScorePool {
 public:
  explicit ScorePool(ThreadPool& threads) : threads_(threads) {}

  void score_rows(Isa isa, const ScoreForm& form, const std::vector<ScoreCall>& calls);

 private:
  void take_runs();
  void score_run(const ScoreCall& call, std::size_t index, std::size_t run);
  std::size_t num_runs(const ScoreCall& call) const;

  ThreadPool& threads_;
  std::vector<float> q_;  // of all calls
  std::atomic<std::size_t> next_run_{0};
  std::size_t rows_of_run_ = 0;
  Isa isa_ = Isa::kGeneric;
  const ScoreForm* form_ = nullptr;
  const std::vector<ScoreCall>* calls_ = nullptr;
};

}  // namespace ambidex
