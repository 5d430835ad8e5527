#include "ops/script.h"

#include <thread>

#include "core/pause.h"

namespace ambidex {
namespace {

// A reading of the clock costs about as much as this many pauses.
constexpr int kPausesPerReading = 64;

}  // namespace

bool AttentionScript::wait(std::size_t layer, std::chrono::microseconds limit) const {
  const std::int32_t* word = asked_ + layer * kWordStride;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerReading; ++i) {
      if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != 0) return true;
      pause();
    }
    std::this_thread::yield();  // on a machine with fewer cores than threads, whoever brings the queries needs one
  } while (std::chrono::steady_clock::now() < end);
  return __atomic_load_n(word, __ATOMIC_ACQUIRE) != 0;
}

void AttentionScript::bound_layer(BoundedPool& pool, BoundedCall call) {
  if (call.other_lse != nullptr) call.other_word = streamed_ + bounded_.size() * kWordStride;
  bounded_pool_ = &pool;
  bounded_.push_back(call);
}

AttentionScript::Outcome AttentionScript::run(const std::vector<const KeyBatch*>& batches,
                                              const std::vector<const KeyBatch*>& scanned,
                                              std::chrono::microseconds limit) {
  Outcome outcome{0, 0};
  busy_ = {};
  for (std::size_t layer = 0; layer < num_layers_; ++layer) {
    if (!wait(layer, limit)) return outcome;
    const auto begin = std::chrono::steady_clock::now();
    pool_.attend(isa_, calls_[layer], *batches[layer]);
    if (!bounded_.empty()) bounded_pool_->attend(bounded_form(isa_), bounded_[layer], *scanned[layer]);
    outcome.num_last += __atomic_load_n(streamed_ + layer * kWordStride, __ATOMIC_ACQUIRE) != 0;
    __atomic_store_n(answered_ + layer * kWordStride, 1, __ATOMIC_RELEASE);
    ++outcome.num_answered;
    busy_ += std::chrono::steady_clock::now() - begin;
  }
  return outcome;
}

}  // namespace ambidex
