// Quantised matrices of every type: rows that are packed come back as ggml defines them, and products of every available
// instruction set against double precision, within the bound that quant-inl.h states; sizes around the groups', weights
// ending at a page that must not be touched, damaged scales, x that is not finite.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/linear.h"
#include "ops/quant.h"

namespace ambidex::emulated {
void pack_quant_tile_piece(const float* x, std::size_t num_tokens, std::size_t num_in, std::size_t piece, char* packed,
                           std::uint8_t* num_terms);
void multiply_quant_tile_range(const LinearRange& range);
}  // namespace ambidex::emulated

namespace {

using namespace ambidex;

constexpr Number kTypes[] = {Number::kQ8_0, Number::kQ4_0, Number::kQ4_1,
                            Number::kQ4_K, Number::kQ5_K, Number::kQ6_K};

// Bytes whose last one lies in front of a page without access.
class Guarded {
 public:
  explicit Guarded(std::size_t size) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t usable = (size + page - 1) / page * page;
    bytes_ = usable + page;
    base_ = static_cast<std::uint8_t*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    if (mprotect(base_ + usable, page, PROT_NONE) != 0) throw std::runtime_error("mprotect failed");
    data = base_ + usable - size;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, bytes_); }

  std::uint8_t* data;

 private:
  std::uint8_t* base_;
  std::size_t bytes_;
};

double fp16_to_double(const std::uint8_t* p) {
  const unsigned bits = p[0] | p[1] << 8;
  const int exponent = static_cast<int>(bits >> 10 & 31u), fraction = static_cast<int>(bits & 1023u);
  double value = exponent == 0    ? std::ldexp(fraction, -24)
                 : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                  : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 != 0 ? -value : value;
}

// What a stored number is: scale * integer + min, as ggml's dequantize_row functions have it.
struct Stored {
  double scale, min;
  int integer;
  double value() const { return scale * integer + min; }
};

Stored read_stored(Number number, const std::uint8_t* row, std::size_t k) {
  const Block block = block_of(number);
  const std::uint8_t* p = row + k / block.numbers * block.bytes;
  const std::size_t i = k % block.numbers;
  const auto nibble = [i](const std::uint8_t* bytes) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; };
  switch (number) {
    case Number::kQ8_0:
      return {fp16_to_double(p), 0.0, static_cast<std::int8_t>(p[2 + i])};
    case Number::kQ4_0:
      return {fp16_to_double(p), 0.0, nibble(p + 2) - 8};
    case Number::kQ4_1:
      return {fp16_to_double(p), fp16_to_double(p + 2), nibble(p + 4)};
    case Number::kQ6_K: {
      const std::size_t half = i / 128, quarter = i % 128 / 32, l = i % 32;
      const int low = p[64 * half + 32 * (quarter % 2) + l] >> (quarter < 2 ? 0 : 4) & 15;
      const int high = p[128 + 32 * half + l] >> (2 * quarter) & 3;
      return {fp16_to_double(p + 208) * static_cast<std::int8_t>(p[192 + i / 16]), 0.0, (low | high << 4) - 32};
    }
    case Number::kQ4_K:
    case Number::kQ5_K: {
      const std::size_t run = i / 32, l = i % 32;
      const std::uint8_t* six = p + 4;
      const int s = run < 4 ? six[run] & 63 : (six[run + 4] & 15) | (six[run - 4] >> 6) << 4;
      const int m = run < 4 ? six[run + 4] & 63 : (six[run + 4] >> 4) | (six[run] >> 6) << 4;
      const std::uint8_t* lower = p + (number == Number::kQ4_K ? 16 : 48);
      const int low = lower[run / 2 * 32 + l] >> (run % 2 * 4) & 15;
      const int high = number == Number::kQ4_K ? 0 : p[16 + l] >> run & 1;
      return {fp16_to_double(p) * s, -fp16_to_double(p + 2) * m, low | high << 4};
    }
    default:
      throw std::invalid_argument("no quantised type");
  }
}

// Where the fp16 scales of a block begin.
std::vector<std::size_t> scales_at(Number number) {
  if (number == Number::kQ6_K) return {208};
  if (number == Number::kQ8_0 || number == Number::kQ4_0) return {0};
  return {0, 2};
}

struct Shape {
  Number number;
  std::size_t num_in, num_tokens;
  std::vector<std::size_t> num_out;  // by matrix
  bool has_bias, has_residual;
};

std::vector<std::uint8_t> make_rows(const Shape& shape, std::size_t num_rows, std::mt19937& random) {
  std::vector<std::uint8_t> rows(num_rows * row_bytes(shape.number, shape.num_in));
  for (std::uint8_t& byte : rows) byte = static_cast<std::uint8_t>(random());
  const Block block = block_of(shape.number);
  for (std::size_t at = 0; at < rows.size(); at += block.bytes) {
    for (std::size_t scale : scales_at(shape.number)) {  // finite, some subnormal
      rows[at + scale + 1] = static_cast<std::uint8_t>(random() % 0x3cu);
    }
  }
  return rows;
}

std::unique_ptr<Guarded> pack(const Shape& shape, const std::vector<std::uint8_t>& rows, std::size_t num_rows) {
  const std::size_t size = packed_bytes(shape.number, num_rows, shape.num_in);
  auto packed = std::make_unique<Guarded>(size);
  const std::size_t bytes = row_bytes(shape.number, shape.num_in), first = num_rows / 3;  // in two pieces
  pack_rows({shape.number, rows.data(), first, shape.num_in, 0, packed->data});
  pack_rows({shape.number, rows.data() + first * bytes, num_rows - first, shape.num_in, first, packed->data});
  return packed;
}

int report(int wrong, const char* what, Isa isa, const Shape& shape) {
  if (wrong != 0) {
    std::printf("%s, %s: %d wrong values, number %d, %zu columns, %zu tokens, %zu matrices\n",
                std::string(name_of(isa)).c_str(), what, wrong, static_cast<int>(shape.number), shape.num_in,
                shape.num_tokens, shape.num_out.size());
  }
  return wrong;
}

int check_unpack(Isa isa, const Shape& shape, std::size_t num_rows, std::mt19937& random) {
  const std::vector<std::uint8_t> rows = make_rows(shape, num_rows, random);
  const auto packed = pack(shape, rows, num_rows);
  std::vector<std::int64_t> indices;
  for (std::size_t i = 0; i < num_rows; ++i) indices.push_back(static_cast<std::int64_t>(i));
  for (std::size_t i = 0; i < 5; ++i) indices.push_back(static_cast<std::int64_t>(random() % num_rows));
  std::vector<float> values(indices.size() * shape.num_in);
  unpack_rows(isa, {shape.number, packed->data, indices.data(), indices.size(), shape.num_in, values.data()});
  int wrong = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::uint8_t* row = rows.data() + static_cast<std::size_t>(indices[i]) * row_bytes(shape.number, shape.num_in);
    for (std::size_t k = 0; k < shape.num_in; ++k) {
      wrong += values[i * shape.num_in + k] != static_cast<float>(read_stored(shape.number, row, k).value());
    }
  }
  return report(wrong, "unpack", isa, shape);
}

int check_multiply(Isa isa, ThreadPool& threads, const Shape& shape, bool tiles = false) {
  std::mt19937 random(static_cast<unsigned>(shape.num_in * 31 + shape.num_tokens));
  std::normal_distribution<float> normal;
  const std::size_t num_blocks = shape.num_in / 32;
  const Guarded x_bytes(shape.num_tokens * shape.num_in * sizeof(float));
  auto* x = reinterpret_cast<float*>(x_bytes.data);
  std::vector<double> largest(shape.num_tokens * num_blocks);
  for (std::size_t i = 0; i < shape.num_tokens * shape.num_in; ++i) {
    x[i] = normal(random) * (random() % 50 == 0 ? 300.0f : 1.0f);  // outliers
    largest[i / 32] = std::max(largest[i / 32], std::abs(static_cast<double>(x[i])));
  }
  Matrices matrices{shape.number, shape.num_in, {}};
  std::vector<std::vector<std::uint8_t>> rows;
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<std::vector<float>> biases, residuals, ys;
  for (std::size_t num_rows : shape.num_out) {
    rows.push_back(make_rows(shape, num_rows, random));
    memory.push_back(pack(shape, rows.back(), num_rows));
    biases.emplace_back(num_rows);
    for (float& bias : biases.back()) bias = normal(random);
    residuals.emplace_back(num_rows * shape.num_tokens);
    for (float& value : residuals.back()) value = normal(random);
    ys.emplace_back(num_rows * shape.num_tokens, NAN);
  }
  std::vector<Product> products;
  for (std::size_t m = 0; m < shape.num_out.size(); ++m) {
    matrices.parts.push_back({memory[m]->data, shape.has_bias ? biases[m].data() : nullptr, shape.num_out[m]});
    products.push_back({ys[m].data(), shape.has_residual ? residuals[m].data() : nullptr});
  }
  LinearPool pool(threads, tiles);
  pool.multiply(isa, matrices, x, shape.num_tokens, products.data());
  int wrong = 0;
  const std::size_t bytes = row_bytes(shape.number, shape.num_in);
  for (std::size_t m = 0; m < shape.num_out.size(); ++m) {
    std::vector<Stored> weights;
    for (std::size_t i = 0; i < shape.num_out[m] * shape.num_in; ++i) {
      weights.push_back(read_stored(shape.number, rows[m].data() + i / shape.num_in * bytes, i % shape.num_in));
    }
    for (std::size_t t = 0; t < shape.num_tokens; ++t) {
      for (std::size_t n = 0; n < shape.num_out[m]; ++n) {
        double sum = 0.0, size = 0.0, rounded = 0.0;
        const auto add = [&](double term) { sum += term, size += std::abs(term); };
        for (std::size_t k = 0; k < shape.num_in; ++k) {
          const Stored& stored = weights[n * shape.num_in + k];
          const double value = x[t * shape.num_in + k];
          add(stored.scale * stored.integer * value);
          add(stored.min * value);
          size += std::abs(32.0 * stored.scale * value);  // integers are kept from 0 on
          rounded += std::abs(stored.scale * stored.integer) * largest[t * num_blocks + k / 32];
        }
        if (shape.has_bias) add(biases[m][n]);
        if (shape.has_residual) add(residuals[m][t * shape.num_out[m] + n]);
        const double allowed = 0x1p-16 * rounded + std::sqrt(4.0 + static_cast<double>(shape.num_in)) * 0x1p-24 * size;
        wrong += !(std::abs(ys[m][t * shape.num_out[m] + n] - sum) <= allowed);
      }
    }
  }
  return report(wrong, "multiply", isa, shape);
}

// A damaged scale makes its row not finite and leaves the others alone; so does x in its token.
int check_damage(Isa isa, ThreadPool& threads, Number number, bool tiles = false) {
  const std::size_t num_in = 256, num_rows = 40, num_tokens = 3;
  const Shape shape{number, num_in, num_tokens, {num_rows}, false, false};
  std::mt19937 random(1);
  std::vector<std::uint8_t> rows = make_rows(shape, num_rows, random);
  const std::size_t bytes = row_bytes(number, num_in), scale_at = scales_at(number)[0];
  rows[5 * bytes + scale_at + 1] = 0x7e;                                    // NaN
  rows[37 * bytes + scale_at] = 0, rows[37 * bytes + scale_at + 1] = 0x7c;  // infinite
  const auto packed = pack(shape, rows, num_rows);
  std::vector<float> x(num_tokens * num_in, 0.5f), y(num_tokens * num_rows), expected(num_rows);
  x[num_in + 7] = std::numeric_limits<float>::quiet_NaN();
  x[2 * num_in + 255] = std::numeric_limits<float>::infinity();
  const Matrices matrices{number, num_in, {{packed->data, nullptr, num_rows}}};
  const Product product{y.data(), nullptr};
  LinearPool(threads, tiles).multiply(isa, matrices, x.data(), num_tokens, &product);
  int wrong = 0;
  for (std::size_t n = 0; n < num_rows; ++n) {
    wrong += std::isfinite(y[n]) != (n != 5 && n != 37);
    wrong += std::isfinite(y[num_rows + n]) + std::isfinite(y[2 * num_rows + n]);
  }
  return report(wrong, "damage", isa, shape);
}

// The kernel in tiles, over emulated ones: x of bf16 numbers alone has one term, other x two; ranges of all heights, and
// tokens whose results must not depend on how many there are.
int check_tiles(Number number, std::size_t num_in, std::size_t num_rows, std::size_t num_tokens, bool is_exact) {
  const Shape shape{number, num_in, num_tokens, {num_rows}, true, true};
  std::mt19937 random(static_cast<unsigned>(num_in + 31 * num_rows + 1009 * num_tokens));
  std::normal_distribution<float> normal;
  const Guarded x_bytes(num_tokens * num_in * sizeof(float));
  auto* x = reinterpret_cast<float*>(x_bytes.data);
  for (std::size_t i = 0; i < num_tokens * num_in; ++i) {
    x[i] = normal(random) * (random() % 50 == 0 ? 300.0f : 1.0f);
    if (is_exact || i % num_in < kQuantPieceNumbers) {
      std::uint32_t bits;
      std::memcpy(&bits, &x[i], sizeof bits);
      bits &= 0xffff0000u;
      std::memcpy(&x[i], &bits, sizeof bits);
    }
  }
  const std::vector<std::uint8_t> rows = make_rows(shape, num_rows, random);
  const auto weights = pack(shape, rows, num_rows);
  std::vector<float> bias(num_rows), residual(num_tokens * num_rows), y(num_tokens * num_rows, NAN);
  std::vector<float> alone(num_rows, NAN);
  for (float& b : bias) b = normal(random);
  for (float& r : residual) r = normal(random);
  const std::size_t num_pieces = tile_pieces(number, num_in);
  std::vector<std::uint8_t> terms(tile_blocks(num_tokens) * num_pieces);
  const Guarded packed(terms.size() * kQuantPieceBytes);
  const auto multiply = [&](std::size_t first_token, std::size_t count, float* to) {
    for (std::size_t i = 0; i < tile_blocks(count) * num_pieces; ++i) {
      const std::size_t token = i / num_pieces * kTileTokens;
      emulated::pack_quant_tile_piece(x + (first_token + token) * num_in, std::min(kTileTokens, count - token), num_in,
                                      i % num_pieces, reinterpret_cast<char*>(packed.data) + i * kQuantPieceBytes,
                                      &terms[i]);
    }
    emulated::multiply_quant_tile_range({number, weights->data, bias.data(), num_rows, num_in, nullptr,
                                         {reinterpret_cast<const char*>(packed.data), terms.data()}, count, to,
                                         residual.data() + first_token * num_rows, num_rows});
  };
  multiply(0, num_tokens, y.data());
  int wrong = 0;
  for (std::size_t i = 0; i < terms.size(); ++i) wrong += terms[i] != (is_exact || i % num_pieces == 0 ? 1 : kQuantTerms);
  multiply(num_tokens - 1, 1, alone.data());
  wrong += std::memcmp(alone.data(), &y[(num_tokens - 1) * num_rows], num_rows * sizeof(float)) != 0;
  const std::size_t bytes = row_bytes(number, num_in);
  for (std::size_t n = 0; n < num_rows; ++n) {
    std::vector<Stored> stored;
    for (std::size_t k = 0; k < num_in; ++k) stored.push_back(read_stored(number, rows.data() + n * bytes, k));
    for (std::size_t t = 0; t < num_tokens; ++t) {
      const double added[] = {bias[n], residual[t * num_rows + n]};
      double sum = added[0] + added[1], size = std::abs(added[0]) + std::abs(added[1]), rounded = 0.0;
      for (std::size_t k = 0; k < num_in; ++k) {
        const double value = x[t * num_in + k];
        sum += stored[k].value() * value;
        rounded += std::abs(stored[k].value() * value);
        const double offset = number == Number::kQ4_0 ? 24.0 : 16.0;  // that is added to integers, and taken off again
        size += std::abs((stored[k].integer + 2.0 * offset) * stored[k].scale * value);
        size += std::abs(stored[k].min * value);
      }
      // What two terms leave out of x, and a sum in fp32 of what is added.
      const double summed = std::sqrt(4.0 + static_cast<double>(num_in)) * 0x1p-24 * size;
      wrong += !(std::abs(y[t * num_rows + n] - sum) <= summed + (is_exact ? 0.0 : 0x1p-16 * rounded));
    }
  }
  return report(wrong, is_exact ? "emulated tiles, bf16" : "emulated tiles", Isa::kGeneric, shape);
}

int check_all_tiles() {
  int wrong = 0;
  for (Number number : {Number::kQ4_0, Number::kQ4_1, Number::kQ4_K}) {
    const std::size_t step = block_of(number).numbers;
    for (std::size_t num_blocks : {1, 7, 8, 19}) {
      for (std::size_t num_rows : {1, 16, 17, 64}) {
        for (std::size_t num_tokens : {1, 3, 8, 16, 17, 40, 130}) {
          if (num_tokens > 40 && num_rows > 17) continue;
          for (bool is_exact : {true, false}) {
            wrong += check_tiles(number, num_blocks * step, num_rows, num_tokens, is_exact);
          }
        }
      }
    }
  }
  return wrong;
}

}  // namespace

int main() {
  ThreadPool one(1, 0), three(3, 20);
  std::mt19937 random(7);
  int wrong = check_all_tiles(), cases = 0;
  for (Isa isa : available_isas()) {
    for (Number number : kTypes) {
      const std::size_t step = block_of(number).numbers;
      for (std::size_t num_rows = 1; num_rows <= 35; ++num_rows, ++cases) {
        const std::size_t num_in = step * (1 + num_rows % 5), tokens = num_rows % 10;
        wrong += check_unpack(isa, {number, num_in, 0, {num_rows}, false, false}, num_rows, random);
        wrong += check_multiply(isa, one, {number, num_in, tokens, {num_rows}, num_rows % 2 == 0, num_rows % 3 == 0});
      }
      for (std::size_t tokens = 0; tokens <= 17; ++tokens, ++cases) {
        wrong += check_multiply(isa, three, {number, 768, tokens, {67, 1, 130}, tokens % 2 == 1, tokens % 4 == 0});
        wrong += check_multiply(isa, three, {number, 1536, tokens, {600}, false, true});
      }
      wrong += check_damage(isa, three, number);
      ++cases;
      if (isa != Isa::kAmx) continue;
      for (std::size_t tokens = 0; tokens <= 40; ++tokens, ++cases) {
        wrong += check_multiply(isa, three, {number, 768, tokens, {67, 1, 130}, tokens % 2 == 1, tokens % 4 == 0}, true);
        wrong += check_multiply(isa, three, {number, 2816, tokens, {600}, false, true}, true);
      }
      wrong += check_damage(isa, three, number, true);
    }
  }
  std::printf("quant: %d cases, %d wrong values\n", cases, wrong);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
