// linear of every available instruction set against a naive twin in double precision: widths around the vectors' and
// heights around the blocks', every number format and count of tokens, one matrix and several, weights and x ending at a
// page that must not be touched.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/linear.h"

namespace ambidex::emulated {
void pack_tile_piece(const float* x, std::size_t num_tokens, std::size_t num_in, std::size_t piece, char* packed,
                     std::uint8_t* num_terms);
void multiply_tile_range(const LinearRange& range);
}  // namespace ambidex::emulated

namespace {

using namespace ambidex;

// Bytes whose last one lies in front of a page without access.
class Guarded {
 public:
  explicit Guarded(std::size_t size) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t usable = (size + page - 1) / page * page;
    bytes_ = usable + page;
    base_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    if (mprotect(base_ + usable, page, PROT_NONE) != 0) throw std::runtime_error("mprotect failed");
    data_ = base_ + usable - size;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, bytes_); }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  char* base_;
  std::size_t bytes_;
  char* data_;
};

// A random number that each format holds exactly, so that the twin multiplies the same weights: 8 bits of fraction.
float draw(std::mt19937& random) {
  const int whole = static_cast<int>(random() % 255) - 127;
  return std::ldexp(static_cast<float>(whole), -static_cast<int>(random() % 7) - 3);
}

void store(Number number, float value, void* weights, std::size_t i) {
  if (number == Number::kFp32) {
    static_cast<float*>(weights)[i] = value;
    return;
  }
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  auto* halves = static_cast<std::uint16_t*>(weights);
  if (number == Number::kBf16) {
    halves[i] = static_cast<std::uint16_t>(bits >> 16);
  } else {  // normal in fp16: |value| is 0 or in 2^-9 … 2^4
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    halves[i] = static_cast<std::uint16_t>(value == 0.0f ? sign : sign | ((bits & 0x7fffffffu) - 0x38000000u) >> 13);
  }
}

struct Shape {
  Number number;
  std::size_t num_in, num_tokens;
  std::vector<std::size_t> num_out;  // by matrix
  bool has_bias, has_residual;
};

int check(Isa isa, ThreadPool& threads, const Shape& shape) {
  std::mt19937 random(static_cast<unsigned>(shape.num_in * 31 + shape.num_tokens));
  const Guarded x_bytes(shape.num_tokens * shape.num_in * sizeof(float));
  float* x = x_bytes.as<float>();
  for (std::size_t i = 0; i < shape.num_tokens * shape.num_in; ++i) x[i] = draw(random);
  Matrices matrices{shape.number, shape.num_in, {}};
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<std::vector<float>> values, biases, residuals, ys;
  for (std::size_t rows : shape.num_out) {
    memory.push_back(std::make_unique<Guarded>(rows * shape.num_in * size_of(shape.number)));
    values.emplace_back(rows * shape.num_in);
    for (std::size_t i = 0; i < values.back().size(); ++i) {
      values.back()[i] = draw(random);
      store(shape.number, values.back()[i], memory.back()->as<void>(), i);
    }
    biases.emplace_back(rows);
    for (float& bias : biases.back()) bias = draw(random);
    residuals.emplace_back(rows * shape.num_tokens);
    for (float& value : residuals.back()) value = draw(random);
    ys.emplace_back(rows * shape.num_tokens, NAN);
  }
  std::vector<Product> products;
  for (std::size_t m = 0; m < shape.num_out.size(); ++m) {
    matrices.parts.push_back({memory[m]->as<void>(), shape.has_bias ? biases[m].data() : nullptr, shape.num_out[m]});
    products.push_back({ys[m].data(), shape.has_residual ? residuals[m].data() : nullptr});
  }
  LinearPool pool(threads);
  pool.multiply(isa, matrices, x, shape.num_tokens, products.data());
  int wrong = 0;
  for (std::size_t m = 0; m < shape.num_out.size(); ++m) {
    for (std::size_t t = 0; t < shape.num_tokens; ++t) {
      for (std::size_t n = 0; n < shape.num_out[m]; ++n) {
        double sum = 0.0, size = 0.0;
        const auto add = [&](double term) { sum += term, size += std::abs(term); };
        for (std::size_t k = 0; k < shape.num_in; ++k) {
          add(static_cast<double>(values[m][n * shape.num_in + k]) * x[t * shape.num_in + k]);
        }
        if (shape.has_bias) add(biases[m][n]);
        if (shape.has_residual) add(residuals[m][t * shape.num_out[m] + n]);
        // A sum of n terms in fp32 is off by n / 2 ulp of the terms' size at the very most; one in lanes by far less.
        const double allowed = std::sqrt(4.0 + static_cast<double>(shape.num_in)) * 0x1p-24 * size;
        wrong += !(std::abs(ys[m][t * shape.num_out[m] + n] - sum) <= allowed);
      }
    }
  }
  if (wrong != 0) {
    std::printf("%s: %d wrong values, number %d, %zu columns, %zu tokens, %zu matrices\n",
                std::string(name_of(isa)).c_str(), wrong, static_cast<int>(shape.number), shape.num_in, shape.num_tokens,
                shape.num_out.size());
  }
  return wrong;
}

// The kernel in tiles, over emulated ones: rows with and without numbers that bf16 does not hold, so that pieces have one
// term and three; ranges of all heights, and tokens whose results must not depend on how many there are.
int check_tiles(std::size_t num_in, std::size_t num_rows, std::size_t num_tokens, bool is_exact) {
  std::mt19937 random(static_cast<unsigned>(num_in + 31 * num_rows + 1009 * num_tokens));
  const Guarded x_bytes(num_tokens * num_in * sizeof(float)), weights(num_rows * num_in * sizeof(std::uint16_t));
  float* x = x_bytes.as<float>();
  for (std::size_t i = 0; i < num_tokens * num_in; ++i) {
    x[i] = draw(random) * (is_exact || i % num_in < kPieceNumbers ? 1.0f : 1.000001f);
  }
  std::vector<float> values(num_rows * num_in), y(num_tokens * num_rows, NAN), alone(num_rows, NAN), bias(num_rows);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = draw(random);
    store(Number::kBf16, values[i], weights.as<void>(), i);
  }
  for (float& b : bias) b = draw(random);
  const std::size_t num_pieces = tile_pieces(num_in);
  std::vector<std::uint8_t> terms(tile_blocks(num_tokens) * num_pieces);
  const Guarded packed(terms.size() * kMostTerms * kPieceBytes);
  const auto pack = [&](std::size_t first_token, std::size_t count) {
    for (std::size_t i = 0; i < tile_blocks(count) * num_pieces; ++i) {
      const std::size_t token = i / num_pieces * kTileTokens;
      emulated::pack_tile_piece(x + (first_token + token) * num_in, std::min(kTileTokens, count - token), num_in,
                                i % num_pieces, packed.as<char>() + i * kMostTerms * kPieceBytes, &terms[i]);
    }
  };
  const auto multiply = [&](std::size_t count, float* to) {
    emulated::multiply_tile_range({Number::kBf16, weights.as<void>(), bias.data(), num_rows, num_in, nullptr,
                                   {packed.as<char>(), terms.data()}, count, to, nullptr, num_rows});
  };
  pack(0, num_tokens);
  int wrong = 0;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    wrong += terms[i] != (is_exact || i % num_pieces == 0 ? 1 : kMostTerms);
  }
  multiply(num_tokens, y.data());
  pack(num_tokens - 1, 1);
  multiply(1, alone.data());
  wrong += std::memcmp(alone.data(), &y[(num_tokens - 1) * num_rows], num_rows * sizeof(float)) != 0;
  for (std::size_t t = 0; t < num_tokens; ++t) {
    for (std::size_t n = 0; n < num_rows; ++n) {
      double sum = bias[n], size = std::abs(bias[n]);
      for (std::size_t k = 0; k < num_in; ++k) {
        const double term = static_cast<double>(values[n * num_in + k]) * x[t * num_in + k];
        sum += term, size += std::abs(term);
      }
      const double allowed = std::sqrt(4.0 + static_cast<double>(num_in)) * 0x1p-24 * size;
      wrong += !(std::abs(y[t * num_rows + n] - sum) <= allowed);
    }
  }
  if (wrong != 0) {
    std::printf("emulated tiles: %d wrong values, %zu columns, %zu rows, %zu tokens\n", wrong, num_in, num_rows,
                num_tokens);
  }
  return wrong;
}

int check_all_tiles() {
  int wrong = 0;
  for (std::size_t num_in : {1, 31, 32, 33, 512, 545, 1100}) {
    for (std::size_t num_rows : {1, 16, 17, 64}) {
      for (std::size_t num_tokens : {1, 16, 17, 65, 130}) {
        for (bool is_exact : {true, false}) wrong += check_tiles(num_in, num_rows, num_tokens, is_exact);
      }
    }
  }
  wrong += check_tiles(9000, 33, 80, false);  // x of more than one panel
  return wrong;
}

}  // namespace

int main() {
  ThreadPool one(1, 0), three(3, 20);
  int wrong = check_all_tiles(), cases = 0;
  for (Isa isa : available_isas()) {
    for (Number number : {Number::kFp32, Number::kBf16, Number::kFp16}) {
      for (std::size_t num_in = 1; num_in <= 70; ++num_in, ++cases) {  // two AVX-512 steps and a rest
        const std::size_t tokens = 1 + num_in % 9, rows = 1 + num_in * 7 % 23;
        wrong += check(isa, one, {number, num_in, tokens, {rows}, num_in % 2 == 0, num_in % 3 == 0});
      }
      for (std::size_t tokens = 0; tokens <= 17; ++tokens, ++cases) {
        wrong += check(isa, three, {number, 257, tokens, {67, 1, 130}, tokens % 2 == 1, tokens % 4 == 0});
        wrong += check(isa, three, {number, 576, tokens, {600}, false, true});
      }
    }
  }
  std::printf("linear: %d cases, %d wrong values\n", cases, wrong);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
