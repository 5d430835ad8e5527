// The CPU lane of a captured step: for each layer, wait until the accelerator has brought the queries, attend over the
// keys in DRAM, say that the answer is there. No Python, no lock held while waiting, nothing allocated.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention.h"
#include "ops/bounded.h"
#include "simd/isa.h"

namespace ambidex {

class AttentionScript {
 public:
  // Words lie a cache line apart, so that the accelerator's writes and the CPU's do not share one.
  static constexpr std::size_t kWordStride = 16;

  // asked, answered, streamed: words of each layer, kWordStride apart; they must outlive the script. A word is 0 until
  // the accelerator has written the layer's queries, the CPU its answer, or the accelerator has ended its own part of
  // the layer's attention, and 1 from then on.
  AttentionScript(AttentionPool& pool, Isa isa, const std::int32_t* asked, std::int32_t* answered,
                  const std::int32_t* streamed, std::size_t num_layers)
      : pool_(pool), isa_(isa), asked_(asked), answered_(answered), streamed_(streamed), num_layers_(num_layers) {}

  std::size_t num_layers() const { return num_layers_; }
  const std::vector<AttendCall>& layers() const { return calls_; }
  void add_layer(const AttendCall& call) { calls_.push_back(call); }

  // Bounded attention over other keys of the layer that was added last, joined with its answer. `call` has no
  // other_word: what the accelerator saw counts once it has ended its own part of the layer's attention.
  void bound_layer(BoundedPool& pool, BoundedCall call);
  const std::vector<BoundedCall>& bounded_layers() const { return bounded_; }

  struct Outcome {
    std::size_t num_answered;  // layers: fewer than all if the queries of one did not come in time
    std::size_t num_last;      // layers in which the CPU's answer came after the accelerator's part had ended
  };

  // How long the last run attended, its waits left out.
  std::chrono::duration<double> busy() const { return busy_; }

  // batches: the keys of each layer; scanned: those that bounded attention reads, if layers are bounded; limit: how long
  // to wait for the queries of a layer.
  Outcome run(const std::vector<const KeyBatch*>& batches, const std::vector<const KeyBatch*>& scanned,
              std::chrono::microseconds limit);

 private:
  bool wait(std::size_t layer, std::chrono::microseconds limit) const;

  AttentionPool& pool_;
  Isa isa_;
  const std::int32_t* asked_;
  std::int32_t* answered_;
  const std::int32_t* streamed_;
  std::size_t num_layers_;
  std::vector<AttendCall> calls_;
  BoundedPool* bounded_pool_ = nullptr;
  std::vector<BoundedCall> bounded_;
  std::chrono::duration<double> busy_{0};
};

}  // namespace ambidex
