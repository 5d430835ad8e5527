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

std::size_t AttentionScript::run(const std::vector<const KeyBatch*>& batches, std::chrono::microseconds limit) {
  for (std::size_t layer = 0; layer < num_layers_; ++layer) {
    if (!wait(layer, limit)) return layer;
    pool_.attend(isa_, calls_[layer], *batches[layer]);
    __atomic_store_n(answered_ + layer * kWordStride, 1, __ATOMIC_RELEASE);
  }
  return num_layers_;
}

}  // namespace ambidex
