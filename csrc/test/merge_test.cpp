// merge_states of every available instruction set against a naive twin in double precision: all lengths around the
// vector width, all misalignments, and each array ending at a page that must not be touched.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/merge.h"

namespace {

using ambidex::Isa;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::size_t kRows = 5;

// Floats whose last one lies `gap` floats in front of a page without access.
class Guarded {
 public:
  Guarded(std::size_t size, std::size_t gap) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t wanted = (size + gap) * sizeof(float);
    const std::size_t usable = (wanted + page - 1) / page * page;
    bytes_ = usable + page;
    base_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    if (mprotect(base_ + usable, page, PROT_NONE) != 0) throw std::runtime_error("mprotect failed");
    data_ = reinterpret_cast<float*>(base_ + usable - wanted);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, bytes_); }

  float* data() const { return data_; }
  float& operator[](std::size_t i) const { return data_[i]; }

 private:
  char* base_;
  std::size_t bytes_;
  float* data_;
};

// The naive twin: one element at a time, in double.
struct Expected {
  double out, lse;
};
Expected naive(double out_a, double lse_a, double out_b, double lse_b) {
  double sum = 0.0;
  double weighted = 0.0;
  if (!std::isinf(lse_a)) sum += std::exp(lse_a), weighted += std::exp(lse_a) * out_a;
  if (!std::isinf(lse_b)) sum += std::exp(lse_b), weighted += std::exp(lse_b) * out_b;
  return sum == 0.0 ? Expected{0.0, -std::numeric_limits<double>::infinity()} : Expected{weighted / sum, std::log(sum)};
}

// The last two rows see no key on one side (whose out is NaN), the one before them none on either.
void fill(const Guarded& out_a, const Guarded& lse_a, const Guarded& out_b, const Guarded& lse_b, std::size_t dim) {
  std::mt19937 random(static_cast<unsigned>(dim));
  std::normal_distribution<float> normal;
  for (std::size_t row = 0; row < kRows; ++row) {
    lse_a[row] = row == 2 || row == 3 ? -kInf : 5.0f * normal(random);
    lse_b[row] = row == 2 || row == 4 ? -kInf : 5.0f * normal(random);
    for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
      out_a[i] = std::isinf(lse_a[row]) ? NAN : normal(random);
      out_b[i] = std::isinf(lse_b[row]) ? NAN : normal(random);
    }
  }
}

// Six roundings, each at most half an ulp of the larger side: 4 epsilon leaves room for expf and logf.
bool close(double got, double expected, double scale) {
  if (std::isinf(expected)) return got == expected;
  return std::abs(got - expected) <= 4.0 * std::numeric_limits<float>::epsilon() * scale;
}

double size_of(float x) { return std::isnan(x) ? 0.0 : std::abs(x); }

int check(Isa isa, std::size_t dim, std::size_t gap, bool in_place) {
  const Guarded out_a(kRows * dim, gap), lse_a(kRows, gap), out_b(kRows * dim, gap), lse_b(kRows, gap);
  const Guarded out(kRows * dim, gap), lse(kRows, gap);
  fill(out_a, lse_a, out_b, lse_b, dim);
  std::vector<float> a(out_a.data(), out_a.data() + kRows * dim), a_lse(lse_a.data(), lse_a.data() + kRows);
  const Guarded& result = in_place ? out_a : out;
  const Guarded& result_lse = in_place ? lse_a : lse;
  ambidex::merge_states(isa, {out_a.data(), lse_a.data()}, {out_b.data(), lse_b.data()},
                        {result.data(), result_lse.data()}, kRows, dim);
  int wrong = 0;
  for (std::size_t row = 0; row < kRows; ++row) {
    const double lse_expected = naive(0.0, a_lse[row], 0.0, lse_b[row]).lse;
    wrong += !close(result_lse[row], lse_expected, 1.0 + std::abs(lse_expected));
    for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
      const double scale = size_of(a[i]) + size_of(out_b[i]);
      wrong += !close(result[i], naive(a[i], a_lse[row], out_b[i], lse_b[row]).out, scale);
    }
  }
  if (wrong != 0) {
    std::printf("%s: %d wrong values at dim %zu, gap %zu%s\n", std::string(name_of(isa)).c_str(), wrong, dim, gap,
                in_place ? ", in place" : "");
  }
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0, cases = 0;
  for (Isa isa : ambidex::available_isas()) {
    for (std::size_t dim = 0; dim <= 67; ++dim) {  // four AVX-512 vectors and a rest
      for (std::size_t gap = 0; gap < 16; ++gap, ++cases) wrong += check(isa, dim, gap, gap % 2 == 1);
    }
  }
  std::printf("merge_states: %d cases, %d wrong values\n", cases, wrong);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
