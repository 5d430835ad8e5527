// Neurons of an MLP behind a ReLU of which a token needs a few: their rows are read where they lie, and no others.
//
//   h[i] = relu(x · in_i + bias_i)        in_i, out_i: rows of one table, listed for each neuron
//   y    = Σ over i of h[i] · out_i       out_i is read only where h[i] is not 0; products and sums fp32
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/number.h"
#include "core/pool.h"
#include "simd/isa.h"

namespace ambidex {

struct PickedCall {
  Number number;                // fp32, bf16 or fp16
  const void* table;            // [num_table_rows, width]
  std::size_t num_table_rows;
  std::size_t width;            // a multiple of kPickedStep
  const std::int64_t* in_rows;  // [num_picked], as out_rows
  const std::int64_t* out_rows;
  const float* biases;          // [num_picked] or null
  std::size_t num_picked;
  const float* x;               // [width]
  float* h;                     // [num_picked]
  float* y;                     // [width]
};

constexpr std::size_t kPickedStep = 64;

// Some neurons in the calling thread, added to y. x and y in the order of lay_out_picked.
struct PickedRange {
  const PickedCall* call;
  std::size_t begin, end;
  const float* x;
  float* y;
};
void add_picked(Isa isa, const PickedRange& range);

// To the order in which rows of a number are widened (simd/dot.h), and back.
void lay_out_picked(Isa isa, Number number, const float* x, std::size_t width, float* to);
void put_back_picked(Isa isa, Number number, const float* y, std::size_t width, float* to);

// The threads, which each take a run of the neurons and have a sum of their own: results do not depend on who is faster.
class PickedPool {
 public:
  explicit PickedPool(ThreadPool& threads) : threads_(threads) {}

  // Throws std::invalid_argument for a width that is no multiple of kPickedStep and for rows that are not in the table.
  void relu_sum(Isa isa, const PickedCall& call);

 private:
  void add(std::size_t thread);
  void sum(std::size_t thread);

  ThreadPool& threads_;
  std::vector<float> x_, sums_, total_;
  Isa isa_ = Isa::kGeneric;
  const PickedCall* call_ = nullptr;
};

}  // namespace ambidex
