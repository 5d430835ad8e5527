// attend_range of every available instruction set, and of the AMX kernels over emulated tiles, against a naive twin in
// double precision: all number types, 4-bit K and V beside each other and beside int8, head sizes, groups, numbers of
// queries, block sizes, and windows whose hidden rows hold NaN. Also: rows stored one by one, whole blocks and gathered
// rows agree.
#include "ops/attention.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/kv_int4.h"

namespace ambidex::emulated {
void attend_range(const AttendCall& call, const AttendRange& range, char* workspace);
std::size_t workspace_bytes(const AttendCall& call, std::size_t rows);
}  // namespace ambidex::emulated

namespace {

using namespace ambidex;

struct Form {
  std::string name;
  void (*attend)(Isa isa, const AttendCall& call, const AttendRange& range, char* workspace);
  std::size_t (*bytes)(Isa isa, const AttendCall& call, std::size_t rows);
  Isa isa;
};

std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (Isa isa : available_isas()) forms.push_back({std::string(name_of(isa)), &attend_range, &workspace_bytes, isa});
  forms.push_back({"emulated tiles",
                   [](Isa, const AttendCall& call, const AttendRange& range, char* workspace) {
                     emulated::attend_range(call, range, workspace);
                   },
                   [](Isa, const AttendCall& call, std::size_t rows) { return emulated::workspace_bytes(call, rows); },
                   Isa::kGeneric});
  return forms;
}

struct Shape {
  Number number;
  std::size_t dim, group, queries, block_size, first_key, num_keys;
  bool is_k_packed = false, is_v_packed = false;  // 4-bit numbers, number being kInt8
};


// A value as the number type holds it, and its bytes.
double encode(Number number, double value, unsigned char* bytes) {
  if (number == Number::kInt8) {
    const auto integer = static_cast<std::int8_t>(std::lround(std::fmin(std::fmax(value * 40.0, -127.0), 127.0)));
    std::memcpy(bytes, &integer, 1);
    return integer;
  }
  auto single = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &single, 4);
  if (number == Number::kFp32) {
    std::memcpy(bytes, &single, 4);
    return single;
  }
  if (number == Number::kBf16) {
    const auto half = static_cast<std::uint16_t>(bits >> 16);
    std::memcpy(bytes, &half, 2);
    bits &= 0xffff0000u;
    std::memcpy(&single, &bits, 4);
    return single;
  }
  // fp16, cut: normal numbers only
  if (std::abs(single) < 1e-4f) single = 0.0f;
  std::memcpy(&bits, &single, 4);
  bits &= 0xffffe000u;
  std::memcpy(&single, &bits, 4);
  const std::uint32_t exponent = single == 0.0f ? 0 : (bits >> 23 & 0xffu) - 112;
  const auto half = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | exponent << 10 | (bits >> 13 & 0x3ffu));
  std::memcpy(bytes, &half, 2);
  return single;
}

// K or V of one head: rows by block id and offset, their bytes, and the tiled record.
struct Part {
  std::vector<double> values;  // [N * P, D], times scale
  std::vector<char> rows;      // [N * P, D]
  std::vector<char> tiled;
  std::vector<float> scales;  // [N * P]
};

constexpr std::size_t kNumBlocks = 7;

Part make_part(const Shape& shape, KVPart kind, const KVTiles& tiles, ThreadPool& pool, const std::vector<bool>& visible,
               std::mt19937& random) {
  std::normal_distribution<double> normal;
  Part part;
  const std::size_t num_rows = kNumBlocks * shape.block_size;
  const std::size_t size = size_of(shape.number);
  part.values.resize(num_rows * shape.dim);
  part.rows.resize(num_rows * shape.dim * size);
  part.tiled.assign(kNumBlocks * tiles.record_bytes, static_cast<char>(0xff));  // NaN in every float type
  part.scales.assign(num_rows, std::numeric_limits<float>::quiet_NaN());
  std::vector<std::int64_t> slots;
  std::vector<char> stored;
  for (std::size_t row = 0; row < num_rows; ++row) {
    const float scale = shape.number == Number::kInt8 ? 0.02f + 0.01f * static_cast<float>(normal(random)) : 1.0f;
    for (std::size_t d = 0; d < shape.dim; ++d) {
      auto* bytes = reinterpret_cast<unsigned char*>(part.rows.data()) + (row * shape.dim + d) * size;
      part.values[row * shape.dim + d] = encode(shape.number, normal(random), bytes) * scale;
    }
    if (!visible[row]) continue;
    part.scales[row] = scale;
    slots.push_back(static_cast<std::int64_t>(row));
    stored.insert(stored.end(), part.rows.begin() + static_cast<std::ptrdiff_t>(row * shape.dim * size),
                  part.rows.begin() + static_cast<std::ptrdiff_t>((row + 1) * shape.dim * size));
  }
  const TiledPart to{kind, tiles, 1, kNumBlocks, shape.dim};
  store_rows(pool, to, part.tiled.data(), slots.data(), slots.size(), stored.data());
  return part;
}

// The same of 4-bit numbers; its values are read back from bytes and words one by one.
Part make_packed_part(const Shape& shape, KVPart kind, const std::vector<bool>& visible, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const std::size_t num_rows = kNumBlocks * shape.block_size, padded = (shape.dim + 31) / 32 * 32, half = padded / 2;
  const std::size_t num_words = words_of(padded);
  const KVTiles tiles = make_tiles(1, shape.block_size, half);
  const TiledPart to{kind, tiles, 1, kNumBlocks, half};
  Part part;
  part.values.resize(num_rows * shape.dim);
  part.tiled.assign(kNumBlocks * tiles.record_bytes, static_cast<char>(0xff));
  part.scales.assign(num_rows * num_words, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> row(shape.dim);
  for (std::size_t slot = 0; slot < num_rows; ++slot) {
    for (float& x : row) x = normal(random);
    row[3] *= 6.0f;  // a dim that is larger than the others
    if (!visible[slot]) continue;
    const auto place = static_cast<std::int64_t>(slot);
    store_values(Isa::kGeneric, Number::kInt4, to, part.tiled.data(), part.scales.data(), &place, 1, shape.dim, row.data());
    std::vector<std::uint8_t> bytes(half);
    std::vector<float> words(num_words);
    pack_row(Isa::kGeneric, row.data(), shape.dim, padded, bytes.data(), words.data(), 1);
    for (std::size_t d = 0; d < shape.dim; ++d) {
      const std::size_t byte = d / 32 * 16 + d % 16, is_high = d / 16 % 2;
      std::uint8_t grid[4];
      std::memcpy(grid, &words[1 + d / 32], sizeof grid);
      const int number = is_high != 0 ? bytes[byte] >> 4 : bytes[byte] & 15;
      const int whole = static_cast<std::int8_t>(grid[2 * is_high + 1]) + grid[2 * is_high] * number;
      part.values[slot * shape.dim + d] = static_cast<double>(words[0]) * whole;
      const double error = std::abs(part.values[slot * shape.dim + d] - row[d]);
      if (error > words[0] * (0.5 * grid[2 * is_high] + 0.5001) || whole > 127 || whole < -128) {
        std::printf("pack_row: %g became %g, scale %g, step %d\n", row[d], part.values[slot * shape.dim + d], words[0],
                    grid[2 * is_high]);
        std::exit(EXIT_FAILURE);
      }
    }
  }
  return part;
}

struct Answer {
  std::vector<double> out;
  double lse;
};

// How far each key is from a query, and what a token of distance costs.
struct Tilt {
  double slope;
  std::vector<double> distances;  // by key
};

Answer naive(const Shape& shape, const float* q, const Part& k, const Part& v, const std::vector<std::size_t>& slots,
             double scale, const Tilt& tilt) {
  std::vector<double> scores;
  double largest = -1e300;
  for (std::size_t slot : slots) {
    double score = 0.0;
    for (std::size_t d = 0; d < shape.dim; ++d) score += q[d] * k.values[slot * shape.dim + d];
    scores.push_back(score * scale - tilt.slope * tilt.distances[scores.size()]);
    largest = std::max(largest, scores.back());
  }
  Answer answer{std::vector<double>(shape.dim), 0.0};
  double sum = 0.0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const double p = std::exp(scores[i] - largest);
    sum += p;
    for (std::size_t d = 0; d < shape.dim; ++d) answer.out[d] += p * v.values[slots[i] * shape.dim + d];
  }
  for (double& x : answer.out) x /= sum;
  answer.lse = largest + std::log(sum);
  return answer;
}

int check(const Shape& shape, const std::vector<Form>& forms, ThreadPool& pool) {
  std::mt19937 random(static_cast<unsigned>(shape.dim * 1000 + shape.num_keys));
  std::normal_distribution<float> normal;
  const KVTiles tiles = make_tiles(size_of(shape.number), shape.block_size, (shape.dim + 31) / 32 * 32);
  const std::vector<std::int64_t> block_ids = {4, 2, 6, 1, 5};
  std::vector<bool> visible(kNumBlocks * shape.block_size);
  std::vector<std::size_t> slots;
  for (std::size_t key = shape.first_key; key < shape.first_key + shape.num_keys; ++key) {
    const auto block = static_cast<std::size_t>(block_ids[key / shape.block_size]);
    slots.push_back(block * shape.block_size + key % shape.block_size);
    visible[slots.back()] = true;
  }
  const auto make = [&](KVPart kind, bool is_packed) {
    return is_packed ? make_packed_part(shape, kind, visible, random)
                     : make_part(shape, kind, tiles, pool, visible, random);
  };
  const Part k = make(KVPart::kK, shape.is_k_packed), v = make(KVPart::kV, shape.is_v_packed);
  const std::size_t rows = shape.queries * shape.group;
  std::vector<float> q(rows * shape.dim);
  for (float& x : q) x = std::ldexp(std::rint(32.0f * normal(random)), -5);  // exact in every type
  AttendCall call{};
  call.number = shape.number;
  call.q_number = Number::kFp32;
  call.k = k.tiled.data();
  call.v = v.tiled.data();
  call.k_scales = k.scales.data();
  call.v_scales = v.scales.data();
  call.is_k_packed = shape.is_k_packed;
  call.is_v_packed = shape.is_v_packed;
  call.tiles = tiles;
  call.num_kv_heads = 1;
  call.num_blocks = kNumBlocks;
  call.q = q.data();
  call.group_size = shape.group;
  call.head_dim = shape.dim;
  call.scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
  // Half of the shapes have slopes; their blocks do not follow each other in the context.
  const bool is_tilted = (shape.dim / 16 + shape.group) % 2 == 0;
  std::vector<float> slopes(shape.group);
  for (std::size_t g = 0; g < shape.group; ++g) slopes[g] = std::ldexp(1.0f, -1 - static_cast<int>(g));
  std::vector<std::int64_t> block_positions, row_positions;
  for (std::size_t i = 0; i < block_ids.size(); ++i) {
    block_positions.push_back(static_cast<std::int64_t>(shape.block_size * (i < 2 ? i : i + 3)));
  }
  const auto position_of = [&](std::size_t key) {
    return block_positions[key / shape.block_size] + static_cast<std::int64_t>(key % shape.block_size);
  };
  for (std::size_t t = 0; t < shape.queries; ++t) {
    row_positions.push_back(position_of(shape.first_key + shape.num_keys - 1) + 1 + static_cast<std::int64_t>(3 * t));
  }
  if (is_tilted) call.slopes = slopes.data();
  int wrong = 0;
  for (const Form& form : forms) {
    std::vector<float> out(rows * shape.dim, -77.0f), lse(rows, -77.0f);
    AttendRange range{block_ids.data(), 0,          0, shape.queries, shape.first_key, shape.num_keys,
                      out.data(),       lse.data(), shape.group};
    range.block_positions = block_positions.data();
    range.row_positions = row_positions.data();
    std::vector<char> workspace(form.bytes(form.isa, call, rows) + 64);
    char* aligned = workspace.data() + (64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64) % 64;
    form.attend(form.isa, call, range, aligned);
    // Values of packed parts are some times larger.
    // Probs rounded to bf16 (AMX, AVX-512-BF16): 2^-9 of |v| at the most. int8 products of 15-bit operands: 2^-15.
    const bool rounds = shape.number == Number::kBf16 && (form.name[0] == 'e' || form.isa >= Isa::kAvx512Bf16);
    const double tolerance = rounds ? 1.5e-2 : shape.is_k_packed || shape.is_v_packed ? 2e-3 : shape.number == Number::kInt8 ? 4e-4 : 8e-6;
    double worst = 0.0, worst_lse = 0.0;
    for (std::size_t row = 0; row < rows; ++row) {
      Tilt tilt{is_tilted ? slopes[row % shape.group] : 0.0, {}};
      for (std::size_t key = shape.first_key; key < shape.first_key + shape.num_keys; ++key) {
        tilt.distances.push_back(static_cast<double>(row_positions[row / shape.group] - position_of(key)));
      }
      const Answer expected = naive(shape, &q[row * shape.dim], k, v, slots, call.scale, tilt);
      for (std::size_t d = 0; d < shape.dim; ++d) {
        const double error = std::abs(out[row * shape.dim + d] - expected.out[d]);
        worst = error <= worst ? worst : error;  // NaN is worst
      }
      const double error = std::abs(lse[row] - expected.lse);
      worst_lse = error <= worst_lse ? worst_lse : error;
    }
    if (worst <= tolerance && worst_lse <= (rounds ? 1e-4 : tolerance)) continue;
    ++wrong;
    std::printf("%s: number %d packed %d %d dim %zu group %zu queries %zu block %zu keys %zu+%zu: error %g, lse %g\n", form.name.c_str(),
                static_cast<int>(shape.number), shape.is_k_packed, shape.is_v_packed, shape.dim, shape.group, shape.queries, shape.block_size, shape.first_key,
                shape.num_keys, worst, worst_lse);
  }
  return wrong;
}

int check_copies(Number number, std::size_t dim, std::size_t block_size, ThreadPool& pool) {
  Shape shape{number, dim, 1, 1, block_size, 0, 1};
  std::mt19937 random(1);
  const KVTiles tiles = make_tiles(size_of(number), block_size, (dim + 31) / 32 * 32);
  int wrong = 0;
  for (KVPart kind : {KVPart::kK, KVPart::kV}) {
    const std::vector<bool> visible(kNumBlocks * block_size, true);
    const Part part = make_part(shape, kind, tiles, pool, visible, random);
    const TiledPart to{kind, tiles, 1, kNumBlocks, dim};
    std::vector<std::int64_t> ids(kNumBlocks);
    for (std::size_t i = 0; i < kNumBlocks; ++i) ids[i] = static_cast<std::int64_t>(i);
    std::vector<char> packed(part.tiled.size(), 1);
    pack_blocks(pool, to, packed.data(), ids.data(), kNumBlocks, part.rows.data());
    wrong += packed != part.tiled;
    const std::size_t row_bytes = dim * tiles.element_size;
    const auto copy_from = [&](std::size_t first, std::size_t num, std::vector<char>* rows) {
      std::vector<std::int64_t> places(kNumBlocks);
      for (std::size_t i = 0; i < kNumBlocks; ++i) {
        places[i] = static_cast<std::int64_t>(i * block_size) - static_cast<std::int64_t>(first);
      }
      rows->assign(num * row_bytes, 0);
      copy_rows(pool, to, packed.data(), ids.data(), places.data(), kNumBlocks, {rows->data(), num, num * row_bytes});
    };
    std::vector<char> gathered, some;
    copy_from(0, kNumBlocks * block_size, &gathered);
    wrong += gathered != part.rows;
    copy_from(block_size - 2, 5, &some);
    wrong += !std::equal(some.begin(), some.end(), part.rows.begin() + static_cast<std::ptrdiff_t>((block_size - 2) * row_bytes));
  }
  if (wrong != 0) std::printf("copies: number %d dim %zu block %zu wrong\n", static_cast<int>(number), dim, block_size);
  return wrong;
}

int check_exp2() {
  std::vector<float> x, y;
  for (float value = -140.0f; value < 40.0f; value += 0.000613f) x.push_back(value);
  y.resize(x.size());
  int wrong = 0;
  for (Isa isa : available_isas()) {
    exp2_each(isa, x.data(), y.data(), x.size());
    double worst = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = std::exp2(static_cast<double>(x[i]));
      if (x[i] < -126.0f) {
        wrong += y[i] != 0.0f;
      } else {
        const auto rounded = static_cast<float>(expected);
        const double ulp = std::nextafter(rounded, INFINITY) - rounded;
        worst = std::max(worst, std::abs(y[i] - expected) / ulp);
      }
    }
    std::printf("exp2, %s: %.2f ulp at the most\n", std::string(name_of(isa)).c_str(), worst);
    wrong += worst > 2.0;
  }
  return wrong;
}

}  // namespace

int main() {
  ThreadPool pool(2, 20);
  const std::vector<Form> forms = all_forms();
  int wrong = check_exp2(), cases = 0;
  for (Number number : {Number::kFp32, Number::kBf16, Number::kFp16, Number::kInt8}) {
    for (std::size_t dim : {64, 80, 96, 128, 256}) {
      for (std::size_t block_size : {16, 32, 48, 64, 128}) {
        wrong += check_copies(number, dim, block_size, pool);
        for (std::size_t group : {1, 3, 4, 7, 8}) {
          const std::size_t queries = 1 + (group + dim / 16 + block_size / 16) % 4;
          const std::size_t first = (7 * group + dim / 8) % (2 * block_size);
          wrong += check({number, dim, group, queries, block_size, first, 3 * block_size - 5 - group}, forms, pool);
          wrong += check({number, dim, group, 1, block_size, 0, 1 + 2 * group}, forms, pool);
          cases += 2;
        }
      }
    }
    if (number == Number::kInt8) {
      for (std::size_t dim : {64, 80, 128}) {
        for (std::size_t block_size : {16, 48, 64}) {
          for (std::size_t i = 0; i < 6; ++i, ++cases) {
            const std::size_t group = 1 + 3 * (i % 2);
            wrong += check({number, dim, group, 1 + i, block_size, (7 * i) % 20, 3 * block_size - 21, i != 1, i != 2}, forms, pool);
          }
        }
      }
    }
    wrong += check({number, 64, 3, 21, 32, 5, 100}, forms, pool);  // 63 rows: tiles of rows in part
    wrong += check({number, 64, 8, 8, 16, 0, 80}, forms, pool);
  }
  std::printf("attention: %d shapes in %zu forms, %d wrong\n", cases, forms.size(), wrong);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
