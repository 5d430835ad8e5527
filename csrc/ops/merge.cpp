#include "ops/merge.h"

namespace ambidex {

// Defined in merge-inl.h.
namespace generic {
void merge_states(ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim);
}
namespace avx2 {
void merge_states(ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim);
}
namespace avx512 {
void merge_states(ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim);
}
namespace avx512bf16 {
void merge_states(ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim);
}
namespace amx {
void merge_states(ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim);
}

void merge_states(Isa isa, ConstState a, ConstState b, State merged, std::size_t rows, std::size_t dim) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAmx:
      return amx::merge_states(a, b, merged, rows, dim);
    case Isa::kAvx512Bf16:
      return avx512bf16::merge_states(a, b, merged, rows, dim);
    case Isa::kAvx512:
      return avx512::merge_states(a, b, merged, rows, dim);
    case Isa::kAvx2:
      return avx2::merge_states(a, b, merged, rows, dim);
#endif
    default:
      return generic::merge_states(a, b, merged, rows, dim);
  }
}

}  // namespace ambidex
