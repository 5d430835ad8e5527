#include "ops/rows.h"

#include "simd/call.h"

namespace ambidex {

// Defined in rows-inl.h.
#define AMBIDEX_DECLARE_ROWS(isa)                                                                                       \
  namespace isa {                                                                                                       \
  void rms_norm(const float* x, const float* weight, float eps, std::size_t num_rows, std::size_t width, float* y);     \
  void layer_norm(const float* x, const float* weight, const float* bias, float eps, std::size_t num_rows,              \
                  std::size_t width, float* y);                                                                         \
  void silu_mul(const float* gate, const float* up, std::size_t num, float* y);                                         \
  void rotate(const Rotation& rotation, const float* x, float* y);                                                      \
  std::int64_t likeliest_of(const float* x, std::size_t width);                                                         \
  void narrow(const float* x, std::size_t num, Number number, void* y);                                                 \
  float quantize_row(const float* x, std::size_t num, std::int8_t* y);                                                  \
  }
AMBIDEX_DECLARE_ROWS(generic)
AMBIDEX_DECLARE_ROWS(avx2)
AMBIDEX_DECLARE_ROWS(avx512)
AMBIDEX_DECLARE_ROWS(avx512bf16)
AMBIDEX_DECLARE_ROWS(amx)
#undef AMBIDEX_DECLARE_ROWS

void rms_norm(Isa isa, const float* x, const float* weight, float eps, std::size_t num_rows, std::size_t width,
              float* y) {
  AMBIDEX_CALL(isa, rms_norm, x, weight, eps, num_rows, width, y);
}
void layer_norm(Isa isa, const float* x, const float* weight, const float* bias, float eps, std::size_t num_rows,
                std::size_t width, float* y) {
  AMBIDEX_CALL(isa, layer_norm, x, weight, bias, eps, num_rows, width, y);
}
void silu_mul(Isa isa, const float* gate, const float* up, std::size_t num, float* y) {
  AMBIDEX_CALL(isa, silu_mul, gate, up, num, y);
}
void rotate(Isa isa, const Rotation& rotation, const float* x, float* y) { AMBIDEX_CALL(isa, rotate, rotation, x, y); }
namespace {
std::int64_t likeliest_of(Isa isa, const float* x, std::size_t width) { AMBIDEX_CALL(isa, likeliest_of, x, width); }
}  // namespace
void likeliest(Isa isa, const float* x, std::size_t num_rows, std::size_t width, std::int64_t* places) {
  for (std::size_t row = 0; row < num_rows; ++row) places[row] = likeliest_of(isa, x + row * width, width);
}
void narrow(Isa isa, const float* x, std::size_t num, Number number, void* y) {
  AMBIDEX_CALL(isa, narrow, x, num, number, y);
}
float quantize_row(Isa isa, const float* x, std::size_t num, std::int8_t* y) {
  AMBIDEX_CALL(isa, quantize_row, x, num, y);
}

}  // namespace ambidex
