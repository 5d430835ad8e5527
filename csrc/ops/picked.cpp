#include "ops/picked.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/check.h"
#include "simd/call.h"

namespace ambidex {

// Defined in picked-inl.h.
#define AMBIDEX_DECLARE_PICKED(isa)                                                          \
  namespace isa {                                                                            \
  void add_picked(const PickedRange& range);                                                 \
  void lay_out_picked(Number number, const float* x, std::size_t width, float* to);          \
  void put_back_picked(Number number, const float* y, std::size_t width, float* to);         \
  }
AMBIDEX_DECLARE_PICKED(generic)
AMBIDEX_DECLARE_PICKED(avx2)
AMBIDEX_DECLARE_PICKED(avx512)
AMBIDEX_DECLARE_PICKED(avx512bf16)
AMBIDEX_DECLARE_PICKED(amx)
#undef AMBIDEX_DECLARE_PICKED

void add_picked(Isa isa, const PickedRange& range) { AMBIDEX_CALL(isa, add_picked, range); }
void lay_out_picked(Isa isa, Number number, const float* x, std::size_t width, float* to) {
  AMBIDEX_CALL(isa, lay_out_picked, number, x, width, to);
}
void put_back_picked(Isa isa, Number number, const float* y, std::size_t width, float* to) {
  AMBIDEX_CALL(isa, put_back_picked, number, y, width, to);
}

void PickedPool::relu_sum(Isa isa, const PickedCall& call) {
  AMBIDEX_CHECK(!is_quantized(call.number) && call.number != Number::kInt8, "table: expected fp32, bf16 or fp16");
  AMBIDEX_CHECK(call.width % kPickedStep == 0, "table: expected rows of a multiple of ", kPickedStep, " numbers, got ",
                call.width);
  for (const std::int64_t* rows : {call.in_rows, call.out_rows}) {
    for (std::size_t i = 0; i < call.num_picked; ++i) {
      AMBIDEX_CHECK(rows[i] >= 0 && static_cast<std::size_t>(rows[i]) < call.num_table_rows, "rows: expected 0 to ",
                    call.num_table_rows, " (not included), got ", rows[i]);
    }
  }
  std::lock_guard<std::mutex> lock(threads_.mutex());
  x_.resize(call.width);
  total_.resize(call.width);
  sums_.resize(threads_.num_threads() * call.width);
  lay_out_picked(isa, call.number, call.x, call.width, x_.data());
  isa_ = isa;
  call_ = &call;
  threads_.run([](void* self, std::size_t thread) { static_cast<PickedPool*>(self)->add(thread); }, this);
  threads_.run([](void* self, std::size_t thread) { static_cast<PickedPool*>(self)->sum(thread); }, this);
  put_back_picked(isa, call.number, total_.data(), call.width, call.y);
}

void PickedPool::add(std::size_t thread) {
  const std::size_t count = threads_.num_threads(), num = call_->num_picked;
  float* const y = sums_.data() + thread * call_->width;
  std::memset(y, 0, call_->width * sizeof(float));
  add_picked(isa_, {call_, thread * num / count, (thread + 1) * num / count, x_.data(), y});
}

void PickedPool::sum(std::size_t thread) {
  const std::size_t count = threads_.num_threads(), width = call_->width;
  const std::size_t begin = thread * width / count, end = (thread + 1) * width / count;
  std::copy(sums_.data() + begin, sums_.data() + end, total_.data() + begin);
  for (std::size_t other = 1; other < count; ++other) {
    const float* const y = sums_.data() + other * width;
    for (std::size_t k = begin; k < end; ++k) total_[k] += y[k];
  }
}

}  // namespace ambidex
