// The CPU lane of a captured step: for each layer, wait until the accelerator has brought the queries, attend over the
// keys in DRAM, say that the answer is there. No Python, no lock held while waiting, nothing allocated.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention.h"
#include "simd/isa.h"

namespace ambidex {

class AttentionScript {
 public:
  // Words lie a cache line apart, so that the accelerator's writes and the CPU's do not share one.
  static constexpr std::size_t kWordStride = 16;

  // asked, answered: words of each layer, kWordStride apart; both must outlive the script. A word is 0 until the
  // accelerator has written the layer's queries, or the CPU its answer, and 1 from then on.
  AttentionScript(AttentionPool& pool, Isa isa, const std::int32_t* asked, std::int32_t* answered,
                  std::size_t num_layers)
      : pool_(pool), isa_(isa), asked_(asked), answered_(answered), num_layers_(num_layers) {}

  std::size_t num_layers() const { return num_layers_; }
  const std::vector<AttendCall>& layers() const { return calls_; }
  void add_layer(const AttendCall& call) { calls_.push_back(call); }

  // batches: the keys of each layer. Returns how many layers were answered: fewer than all if the queries of one did
  // not come within `limit`.
  std::size_t run(const std::vector<const KeyBatch*>& batches, std::chrono::microseconds limit);

 private:
  bool wait(std::size_t layer, std::chrono::microseconds limit) const;

  AttentionPool& pool_;
  Isa isa_;
  const std::int32_t* asked_;
  std::int32_t* answered_;
  std::size_t num_layers_;
  std::vector<AttendCall> calls_;
};

}  // namespace ambidex
