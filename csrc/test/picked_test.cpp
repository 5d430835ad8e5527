// relu_sum of every available instruction set against a naive twin in double precision: all number types, one and more
// threads, no neuron at all, rows at the ends of the table, numbers that are none.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "ops/picked.h"

namespace {

using ambidex::Isa;
using ambidex::Number;

constexpr std::size_t kNumRows = 37;

// A table in stored numbers, and the same in double.
struct Table {
  std::vector<char> bytes;
  std::vector<double> values;
};

// A number that bf16 and fp16 hold exactly: 7 bits and a sign, from 2^-8 on.
float coarse(std::mt19937& random) {
  return static_cast<float>(std::uniform_int_distribution<int>(-127, 127)(random)) / 128.0f;
}

std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

std::uint16_t to_fp16(float x) {
  if (x == 0.0f) return 0;
  int exponent;
  const float fraction = std::frexp(std::fabs(x), &exponent);  // in [0.5, 1)
  const auto mantissa = static_cast<std::uint16_t>((2.0f * fraction - 1.0f) * 1024.0f);
  return static_cast<std::uint16_t>((x < 0.0f ? 0x8000 : 0) | (exponent - 1 + 15) << 10 | mantissa);
}

Table make_table(Number number, std::size_t width, std::mt19937& random) {
  Table table;
  const std::size_t size = ambidex::size_of(number);
  table.bytes.resize(kNumRows * width * size);
  for (std::size_t i = 0; i < kNumRows * width; ++i) {
    const float x = coarse(random);
    table.values.push_back(x);
    char* const to = table.bytes.data() + i * size;
    if (number == Number::kFp32) {
      std::memcpy(to, &x, sizeof x);
    } else {
      const std::uint16_t bits = number == Number::kBf16 ? to_bf16(x) : to_fp16(x);
      std::memcpy(to, &bits, sizeof bits);
    }
  }
  return table;
}

int check(Isa isa, Number number, std::size_t width, std::size_t num_picked, std::size_t num_threads, bool has_biases) {
  std::mt19937 random(static_cast<unsigned>(width + num_picked));
  const Table table = make_table(number, width, random);
  std::vector<std::int64_t> in_rows(kNumRows), out_rows(kNumRows);
  std::iota(in_rows.begin(), in_rows.end(), 0);
  std::shuffle(in_rows.begin(), in_rows.end(), random);
  out_rows = in_rows;
  std::shuffle(out_rows.begin(), out_rows.end(), random);
  std::vector<float> x(width), biases(num_picked), h(num_picked, 7.0f), y(width, 7.0f);
  for (float& value : x) value = coarse(random);
  for (float& value : biases) value = coarse(random);
  ambidex::ThreadPool threads(num_threads, 0);
  ambidex::PickedPool pool(threads);
  pool.relu_sum(isa, {number, table.bytes.data(), kNumRows, width, in_rows.data(), out_rows.data(),
                      has_biases ? biases.data() : nullptr, num_picked, x.data(), h.data(), y.data()});
  std::vector<double> wanted(width, 0.0);
  int wrong = 0;
  for (std::size_t i = 0; i < num_picked; ++i) {
    double product = has_biases ? biases[i] : 0.0;
    for (std::size_t k = 0; k < width; ++k) product += table.values[static_cast<std::size_t>(in_rows[i]) * width + k] * x[k];
    const double relu = product > 0.0 ? product : 0.0;
    wrong += std::fabs(h[i] - relu) > 1e-5 * static_cast<double>(width);
    for (std::size_t k = 0; k < width; ++k) wanted[k] += relu * table.values[static_cast<std::size_t>(out_rows[i]) * width + k];
  }
  for (std::size_t k = 0; k < width; ++k) wrong += std::fabs(y[k] - wanted[k]) > 1e-4 * static_cast<double>(width);
  return wrong;
}

// A sum that is no number stays none, and reaches y.
int check_undefined(Isa isa) {
  constexpr std::size_t kWidth = 64;
  std::vector<float> table(2 * kWidth, 1.0f), x(kWidth, std::numeric_limits<float>::quiet_NaN()), h(1), y(kWidth);
  const std::int64_t in_row = 0, out_row = 1;
  ambidex::ThreadPool threads(1, 0);
  ambidex::PickedPool pool(threads);
  pool.relu_sum(isa, {Number::kFp32, table.data(), 2, kWidth, &in_row, &out_row, nullptr, 1, x.data(), h.data(), y.data()});
  return !std::isnan(h[0]) + !std::isnan(y[0]);
}

int check_refused(Isa isa, std::size_t width, std::int64_t row) {
  std::vector<float> table(4 * 128, 1.0f), x(128, 1.0f), h(1), y(128);
  const std::int64_t other = 0;
  ambidex::ThreadPool threads(1, 0);
  ambidex::PickedPool pool(threads);
  try {
    pool.relu_sum(isa, {Number::kFp32, table.data(), 4, width, &row, &other, nullptr, 1, x.data(), h.data(), y.data()});
  } catch (const std::invalid_argument&) {
    return 0;
  }
  return 1;
}

}  // namespace

int main() {
  int wrong = 0;
  for (const Isa isa : ambidex::available_isas()) {
    for (const Number number : {Number::kFp32, Number::kBf16, Number::kFp16}) {
      for (const std::size_t width : {64, 128, 832}) {
        for (const std::size_t num_picked : {0, 1, 2, 5, 37}) {
          for (const std::size_t num_threads : {1, 2, 3}) {
            wrong += check(isa, number, width, num_picked, num_threads, num_picked % 2 == 1);
          }
        }
      }
    }
    wrong += check_undefined(isa);
    wrong += check_refused(isa, 96, 0) + check_refused(isa, 128, 4) + check_refused(isa, 128, -1);
  }
  std::printf("picked: %d wrong\n", wrong);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
