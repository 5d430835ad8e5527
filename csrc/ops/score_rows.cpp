#include "ops/score_rows.h"

#include <algorithm>
#include <mutex>

#include "simd/call.h"

namespace ambidex {

// Defined in score_rows-inl.h.
#define AMBIDEX_DECLARE_SCORES(isa)                                                                                   \
  namespace isa {                                                                                                     \
  void score_range(const ScoreRange& range);                                                                          \
  void lay_out_scored(Number number, Number q_number, const void* q, std::size_t head_dim, float scale, float* to);   \
  }
AMBIDEX_DECLARE_SCORES(generic)
AMBIDEX_DECLARE_SCORES(avx2)
AMBIDEX_DECLARE_SCORES(avx512)
AMBIDEX_DECLARE_SCORES(avx512bf16)
AMBIDEX_DECLARE_SCORES(amx)
#undef AMBIDEX_DECLARE_SCORES

void score_range(Isa isa, const ScoreRange& range) { AMBIDEX_CALL(isa, score_range, range); }
void lay_out_scored(Isa isa, Number number, Number q_number, const void* q, std::size_t head_dim, float scale,
                    float* to) {
  AMBIDEX_CALL(isa, lay_out_scored, number, q_number, q, head_dim, scale, to);
}

namespace {

// Below this one thread is done before another would be awake (10 to 50 us at 10 GB/s).
constexpr std::size_t kAloneBytes = 128 << 10;

// A run is long enough for the memory's rate (its first lines are waited for) and short enough to be shared out evenly.
constexpr std::size_t kLeastRunBytes = 32 << 10, kMostRunBytes = 256 << 10;
constexpr std::size_t kRunsOfThread = 8;

// Runs begin at whole lines of 16-bit scores, if the first does.
constexpr std::size_t kRowsOfLine = 32;

}  // namespace

void ScorePool::score_rows(Isa isa, const ScoreForm& form, const std::vector<ScoreCall>& calls) {
  std::lock_guard<std::mutex> lock(threads_.mutex());
  const std::size_t padded = padded_to_step(form.head_dim), num_heads = form.num_kv_heads * form.group_size;
  const std::size_t row_bytes = form.head_dim * size_of(form.number);
  std::size_t num_bytes = 0;
  q_.resize(calls.size() * num_heads * padded);
  float* to = q_.data();
  for (const ScoreCall& call : calls) {
    num_bytes += form.num_kv_heads * call.num_keys * row_bytes;
    const char* q = static_cast<const char*>(call.q);
    for (std::size_t head = 0; head < num_heads; ++head, to += padded) {
      lay_out_scored(isa, form.number, form.q_number, q + head * form.head_dim * size_of(form.q_number), form.head_dim,
                     form.scale, to);
    }
  }
  const std::size_t run_bytes =
      std::clamp(num_bytes / (threads_.num_threads() * kRunsOfThread), kLeastRunBytes, kMostRunBytes);
  rows_of_run_ = std::max<std::size_t>(1, run_bytes / row_bytes / kRowsOfLine) * kRowsOfLine;
  isa_ = isa;
  form_ = &form;
  calls_ = &calls;
  next_run_.store(0, std::memory_order_relaxed);
  if (num_bytes <= kAloneBytes) return take_runs();
  threads_.run_shared([](void* self, std::size_t) { static_cast<ScorePool*>(self)->take_runs(); }, this);
}

std::size_t ScorePool::num_runs(const ScoreCall& call) const {
  return form_->num_kv_heads * ((call.num_keys + rows_of_run_ - 1) / rows_of_run_);
}

void ScorePool::take_runs() {
  std::size_t index = 0, first = 0;  // of the call that the run belongs to; the first of its runs
  while (index < calls_->size()) {
    const std::size_t run = next_run_.fetch_add(1, std::memory_order_relaxed);
    while (index < calls_->size() && run >= first + num_runs((*calls_)[index])) first += num_runs((*calls_)[index++]);
    if (index < calls_->size()) score_run((*calls_)[index], index, run - first);
  }
}

void ScorePool::score_run(const ScoreCall& call, std::size_t index, std::size_t run) {
  const std::size_t runs_of_head = (call.num_keys + rows_of_run_ - 1) / rows_of_run_;
  const std::size_t head = run / runs_of_head, begin = run % runs_of_head * rows_of_run_;
  const std::size_t padded = padded_to_step(form_->head_dim), stride = call.num_keys * size_of(form_->scores_number);
  const std::size_t row_bytes = form_->head_dim * size_of(form_->number);
  score_range(isa_, {form_->number, form_->scores_number,
                     static_cast<const char*>(call.k) + (head * call.capacity + begin) * row_bytes,
                     std::min(rows_of_run_, call.num_keys - begin), form_->head_dim, form_->group_size,
                     q_.data() + (index * form_->num_kv_heads + head) * form_->group_size * padded,
                     static_cast<char*>(call.scores) + head * form_->group_size * stride +
                         begin * size_of(form_->scores_number),
                     stride});
}

}  // namespace ambidex
