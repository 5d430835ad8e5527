// BoundedPool in the forms of every available instruction set, and with emulated AMX tiles, against a naive twin in double
// precision: what it leaves out and how far its answer is off must lie within what it states, for all number types, head
// sizes, groups and block sizes, with other keys beside, and with hidden rows that hold NaN.
#include "ops/bounded.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/scan_copy.h"

namespace ambidex::emulated {
void scan_range(const BoundedCall& call, const ScanRange& range, char* workspace);
void keep_range(const BoundedCall& call, const KeepRange& range, char* workspace);
std::size_t bounded_workspace_bytes(const BoundedCall& call, std::size_t rows);
}  // namespace ambidex::emulated

namespace {

using namespace ambidex;

constexpr std::size_t kHeads = 2;

struct Form {
  std::string name;
  BoundedForm form;
};

std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (Isa isa : available_isas()) forms.push_back({std::string(name_of(isa)), bounded_form(isa)});
  forms.push_back({"emulated tiles",
                   {&emulated::scan_range, &emulated::keep_range, &emulated::bounded_workspace_bytes}});
  return forms;
}

struct Shape {
  Number number;
  std::size_t dim, group, queries, block_size, first_key, num_keys;
  float max_mass, sharpness;
  bool has_near, has_other;
  float late = 1.0f;  // factor of most keys: all but the first 128 of each 2048
};

// K or V of all heads in a pool, and what its rows are worth.
struct Part {
  std::vector<double> values;  // [heads, slots, dim]
  std::vector<char> records;
  std::vector<float> scales;  // [heads, slots]
};

float rounded(Number number, float x) {
  if (number == Number::kFp32) return x;
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= number == Number::kBf16 ? 0xffff0000u : 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return number == Number::kFp16 && std::abs(x) < 1e-4f ? 0.0f : x;
}

// Factors: of each slot's numbers; 0 where no key is.
Part make_part(const Shape& shape, KVPart kind, std::size_t num_blocks, const std::vector<float>& factors,
               std::mt19937& random, ThreadPool& threads) {
  std::normal_distribution<float> normal;
  const KVTiles tiles = make_tiles(size_of(shape.number), shape.block_size, (shape.dim + 31) / 32 * 32);
  const std::size_t slots = num_blocks * shape.block_size;
  Part part;
  part.values.resize(kHeads * slots * shape.dim);
  part.records.assign(kHeads * num_blocks * tiles.record_bytes, static_cast<char>(0xff));  // NaN in every float type
  part.scales.assign(kHeads * slots, std::numeric_limits<float>::quiet_NaN());
  const TiledPart to{kind, tiles, kHeads, num_blocks, shape.dim};
  std::vector<std::int64_t> places;
  std::vector<float> rows;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    if (factors[slot] == 0.0f) continue;
    places.push_back(static_cast<std::int64_t>(slot));
    for (std::size_t i = 0; i < kHeads * shape.dim; ++i) {
      const float large = i % shape.dim == 3 ? 4.0f : 1.0f;  // a dim that is larger than the others
      rows.push_back(rounded(shape.number, normal(random) * large * factors[slot]));
    }
  }
  store_values(Isa::kGeneric, shape.number, to, part.records.data(),
               shape.number == Number::kInt8 ? part.scales.data() : nullptr, places.data(), places.size(), shape.dim,
               rows.data());
  std::vector<char> gathered(kHeads * slots * shape.dim * size_of(shape.number));
  std::vector<std::int64_t> ids, first_rows;
  for (std::size_t i = 0; i < num_blocks; ++i) {
    ids.push_back(static_cast<std::int64_t>(i));
    first_rows.push_back(static_cast<std::int64_t>(i * to.tiles.block_size));
  }
  copy_rows(threads, to, part.records.data(), ids.data(), first_rows.data(), num_blocks,
            {gathered.data(), slots, slots * shape.dim * size_of(shape.number)});
  for (std::size_t t = 0; t < places.size(); ++t) {
    const auto slot = static_cast<std::size_t>(places[t]);
    for (std::size_t head = 0; head < kHeads; ++head) {
      for (std::size_t d = 0; d < shape.dim; ++d) {
        const std::size_t at = (head * slots + slot) * shape.dim + d;
        part.values[at] = shape.number == Number::kInt8
                              ? static_cast<double>(static_cast<std::int8_t>(gathered[at])) * part.scales[head * slots + slot]
                              : rows[(t * kHeads + head) * shape.dim + d];
      }
    }
  }
  return part;
}

struct Tally {
  int wrong = 0;
  double num_kept = 0.0, num_keys = 0.0;
};

void check(const Shape& shape, const std::vector<Form>& forms, ThreadPool& threads, Tally& tally) {
  std::mt19937 random(static_cast<unsigned>(shape.dim * 1000 + shape.num_keys + shape.group));
  std::normal_distribution<float> normal;
  const std::size_t padded = (shape.dim + 31) / 32 * 32;
  const std::size_t needed = (shape.first_key + shape.num_keys + shape.block_size - 1) / shape.block_size;
  const std::size_t num_blocks = needed + 2, slots = num_blocks * shape.block_size;
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i < needed; ++i) ids.push_back(static_cast<std::int64_t>((i * 5 + 3) % num_blocks));
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  if (ids.size() != needed) {  // 5 divides num_blocks: in order then
    ids.clear();
    for (std::size_t i = 0; i < needed; ++i) ids.push_back(static_cast<std::int64_t>(i + 1));
  }
  std::shuffle(ids.begin(), ids.end(), random);
  std::vector<float> factors(slots), ones(slots);
  for (std::size_t key = 0; key < needed * shape.block_size; ++key) {
    const std::size_t slot = static_cast<std::size_t>(ids[key / shape.block_size]) * shape.block_size + key % shape.block_size;
    factors[slot] = key % 2048 < 128 ? 1.0f : shape.late;
    ones[slot] = 1.0f;
  }
  const Part k = make_part(shape, KVPart::kK, num_blocks, factors, random, threads);
  const Part v = make_part(shape, KVPart::kV, num_blocks, ones, random, threads);
  const bool is_int8 = shape.number == Number::kInt8;
  const KVTiles tiles = make_tiles(size_of(shape.number), shape.block_size, padded);
  const KVTiles scan_tiles = make_tiles(1, shape.block_size, padded);
  std::vector<std::int8_t> scanned(kHeads * num_blocks * scan_tiles.record_bytes, std::int8_t{-1});
  std::vector<float> scales(kHeads * slots, std::numeric_limits<float>::quiet_NaN()), norms(kHeads * num_blocks * 2);
  std::vector<char> rows(kHeads * slots * 2 * padded * size_of(shape.number), static_cast<char>(0xff));
  copy_for_scan(threads, best_isa(),
                {shape.number, tiles, kHeads, num_blocks, shape.dim, k.records.data(), v.records.data(),
                 is_int8 ? k.scales.data() : nullptr, is_int8 ? v.scales.data() : nullptr,
                 is_int8 ? nullptr : scanned.data(), scales.data(), rows.data(), norms.data()},
                ids.data(), ids.size());
  const std::size_t num_q_heads = kHeads * shape.group, num_heads = shape.queries * num_q_heads;
  std::vector<float> q(num_heads * shape.dim);
  for (float& x : q) x = normal(random) * shape.sharpness;
  // Keys elsewhere, as whoever attended them says.
  std::vector<float> near_out(num_heads * shape.dim), near_lse(num_heads), other_lse(num_heads);
  for (float& x : near_out) x = 0.3f * normal(random);
  for (float& x : near_lse) x = 1.0f + std::log(static_cast<float>(shape.num_keys)) + normal(random);
  for (float& x : other_lse) x = std::log(static_cast<float>(shape.num_keys)) + normal(random);
  const std::int32_t is_known = 1;
  const std::int64_t block_offsets[] = {0, static_cast<std::int64_t>(needed)};
  const std::int64_t row_offsets[] = {0, static_cast<std::int64_t>(shape.queries)};
  const auto first_key = static_cast<std::int64_t>(shape.first_key), num_keys = static_cast<std::int64_t>(shape.num_keys);
  const KeyBatch batch(ids.data(), ids.size(), block_offsets, &first_key, &num_keys, row_offsets, 1, shape.block_size);
  const double scale = 1.0 / std::sqrt(static_cast<double>(shape.dim));
  for (const Form& form : forms) {
    std::vector<float> out(num_heads * shape.dim, -77.0f), lse(num_heads, -77.0f), figures(num_heads * kNumBoundedFigures);
    BoundedCall call{};
    call.scan.number = Number::kInt8;
    call.scan.q_number = Number::kFp32;
    call.scan.k = is_int8 ? k.records.data() : reinterpret_cast<const char*>(scanned.data());
    call.scan.k_scales = is_int8 ? k.scales.data() : scales.data();
    call.scan.v = v.records.data();
    call.scan.tiles = scan_tiles;
    call.scan.num_kv_heads = kHeads;
    call.scan.num_blocks = num_blocks;
    call.scan.num_rows = shape.queries;
    call.scan.q = q.data();
    call.scan.group_size = shape.group;
    call.scan.head_dim = shape.dim;
    call.scan.scale = static_cast<float>(scale);
    call.scan.out = out.data();
    call.scan.lse = lse.data();
    call.rows = is_int8 ? nullptr : rows.data();
    call.v_number = shape.number;
    call.v_tiles = tiles;
    call.v = v.records.data();
    call.v_scales = is_int8 ? v.scales.data() : nullptr;
    call.norms = norms.data();
    call.max_mass = shape.max_mass;
    call.near_out = shape.has_near ? near_out.data() : nullptr;
    call.near_lse = shape.has_near ? near_lse.data() : nullptr;
    call.other_lse = shape.has_other ? other_lse.data() : nullptr;
    call.other_word = shape.has_other ? &is_known : nullptr;
    call.figures = figures.data();
    std::vector<std::int32_t> kept_of_block(num_blocks, 0);
    call.kept_of_block = kept_of_block.data();
    BoundedPool pool(threads);
    pool.attend(form.form, call, batch);
    double worst_mass = 0.0, worst_error = 0.0;
    int wrong = 0;
    for (std::size_t place = 0; place < num_heads; ++place) {
      const std::size_t kv_head = place % num_q_heads / shape.group;
      std::vector<double> scores, truth(shape.dim);
      double top = shape.has_near ? near_lse[place] : -1e300, sum = 0.0, longest = 0.0;
      for (std::size_t key = shape.first_key; key < shape.first_key + shape.num_keys; ++key) {
        const std::size_t slot = static_cast<std::size_t>(ids[key / shape.block_size]) * shape.block_size + key % shape.block_size;
        const double* row = &k.values[(kv_head * slots + slot) * shape.dim];
        double score = 0.0;
        for (std::size_t d = 0; d < shape.dim; ++d) score += q[place * shape.dim + d] * row[d];
        scores.push_back(score * static_cast<double>(call.scan.scale));
        top = std::max(top, scores.back());
      }
      if (shape.has_near) {
        sum = std::exp(near_lse[place] - top);
        for (std::size_t d = 0; d < shape.dim; ++d) truth[d] = sum * near_out[place * shape.dim + d];
      }
      for (std::size_t i = 0; i < scores.size(); ++i) {
        const std::size_t key = shape.first_key + i;
        const std::size_t slot = static_cast<std::size_t>(ids[key / shape.block_size]) * shape.block_size + key % shape.block_size;
        const double p = std::exp(scores[i] - top);
        const double* row = &v.values[(kv_head * slots + slot) * shape.dim];
        double norm = 0.0;
        sum += p;
        for (std::size_t d = 0; d < shape.dim; ++d) {
          truth[d] += p * row[d];
          norm += row[d] * row[d];
        }
        longest = std::max(longest, std::sqrt(norm));
      }
      double error = 0.0;
      for (std::size_t d = 0; d < shape.dim; ++d) {
        error += std::pow(truth[d] / sum - out[place * shape.dim + d], 2);
      }
      error = std::sqrt(error);
      const float* figure = &figures[place * kNumBoundedFigures];
      const double whole = top + std::log(sum);
      // What is missing from the softmax shows in lse; other keys make its share smaller.
      double mass = -std::expm1(lse[place] - whole);
      if (shape.has_other) mass *= 1.0 / (1.0 + std::exp(other_lse[place] - whole));
      const double rounding = 1e-5 * (1.0 + std::abs(whole));
      const double blur = is_int8 ? figure[kErrorShare] - figure[kDroppedMass] : 0.0;
      worst_mass = std::max(worst_mass, mass);
      worst_error = std::max(worst_error, error);
      wrong += !(mass <= figure[kDroppedMass] + blur + rounding);
      wrong += !(figure[kDroppedMass] <= shape.max_mass * 1.00001);
      wrong += !(figure[kValueNorm] >= longest * (1 - 1e-6) && figure[kValueNorm] <= longest * 1.5 + 2.0);
      const double bound = figure[kErrorShare] * (figure[kValueNorm] + figure[kOutNorm]);
      if (!shape.has_other) {
        wrong += !(error <= bound + 2e-5 * longest);
        wrong += !(bound <= 2.01 * (shape.max_mass + blur) * longest * 1.5 + 1.0);
      }
      wrong += !(blur <= 0.03);
      if (shape.max_mass == 0.0f) wrong += figure[kNumKept] != static_cast<float>(shape.num_keys) || figure[kDroppedMass] != 0.0f;
      tally.num_kept += figure[kNumKept];
      tally.num_keys += static_cast<double>(shape.num_keys);
    }
    // By blocks as by groups, and of a block no more than a head sees of it.
    double counted = 0.0, kept = 0.0;
    for (std::size_t head = 0; head < kHeads; ++head) kept += figures[head * shape.group * kNumBoundedFigures + kNumKept];
    std::vector<std::size_t> visible(num_blocks, 0);
    for (std::size_t key = shape.first_key; key < shape.first_key + shape.num_keys; ++key) {
      ++visible[static_cast<std::size_t>(ids[key / shape.block_size])];
    }
    for (std::size_t i = 0; i < num_blocks; ++i) {
      counted += kept_of_block[i];
      wrong += kept_of_block[i] > static_cast<std::int32_t>(kHeads * visible[i]);
    }
    wrong += counted != kept;
    if (wrong == 0) continue;
    tally.wrong += wrong;
    std::printf("%s: number %d dim %zu group %zu queries %zu block %zu keys %zu+%zu mass %g sharp %g near %d other %d: %d wrong, mass %g, error %g\n",
                form.name.c_str(), static_cast<int>(shape.number), shape.dim, shape.group, shape.queries, shape.block_size,
                shape.first_key, shape.num_keys, shape.max_mass, shape.sharpness, shape.has_near, shape.has_other, wrong,
                worst_mass, worst_error);
  }
}

}  // namespace

int main() {
  ThreadPool threads(2, 20);
  const std::vector<Form> forms = all_forms();
  Tally exact, flat, sharp, lean;
  int cases = 0;
  for (Number number : {Number::kFp32, Number::kBf16, Number::kFp16, Number::kInt8}) {
    for (std::size_t dim : {64, 80, 128, 256}) {
      for (std::size_t block_size : {16, 64, 128}) {
        for (std::size_t group : {1, 3, 4, 7}) {
          const std::size_t queries = 1 + (group + dim / 16) % 2, first = (7 * group + dim / 8) % block_size;
          const bool has_near = (group + block_size / 16) % 3 == 0, has_other = (group + dim / 16) % 3 == 1;
          const std::size_t keys = 200 + 37 * group;
          check({number, dim, group, queries, block_size, first, keys, 0.01f, 2.0f, has_near, has_other}, forms, threads, sharp);
          check({number, dim, group, 1, block_size, 0, keys, 0.2f, 1.0f, has_near, has_other}, forms, threads, flat);
          check({number, dim, group, 1, block_size, first, 1 + group, 0.0f, 1.0f, has_near, false}, forms, threads, exact);
          cases += 3;
        }
      }
    }
    // Many tasks, sampled thresholds; more than one set of rows in a tile.
    check({number, 64, 4, 1, 64, 5, 5000, 0.01f, 2.0f, false, false}, forms, threads, sharp);
    check({number, 128, 4, 1, 64, 0, 5000, 0.0001f, 3.0f, true, false}, forms, threads, sharp);
    check({number, 64, 8, 3, 32, 3, 3000, 0.05f, 2.0f, true, false}, forms, threads, sharp);
    // One head, whose softmax few keys hold: most must be left out.
    check({number, 128, 1, 1, 64, 7, 5000, 0.05f, 3.0f, false, false}, forms, threads, lean);
    // Ranges so long that a part has many pieces, and such whose first keys weigh more than the others.
    check({number, 64, 1, 1, 64, 7, 40000, 0.01f, 3.0f, true, false}, forms, threads, lean);
    check({number, 64, 4, 1, 64, 0, 40000, 0.01f, 3.0f, false, false, 0.2f}, forms, threads, sharp);
    check({number, 64, 2, 1, 32, 0, 12000, 0.02f, 2.0f, false, true, 0.5f}, forms, threads, sharp);
  }
  const int wrong = exact.wrong + flat.wrong + sharp.wrong + lean.wrong;
  std::printf("bounded: %d shapes in %zu forms; kept %.0f %% of keys, %.0f %% of flat ones, %.0f %% for one head; %d wrong\n",
              cases, forms.size(), 100.0 * sharp.num_kept / sharp.num_keys, 100.0 * flat.num_kept / flat.num_keys,
              100.0 * lean.num_kept / lean.num_keys, wrong);
  const bool leaves_out = lean.num_kept < 0.4 * lean.num_keys && flat.num_kept < 0.98 * flat.num_keys;
  return wrong == 0 && leaves_out ? EXIT_SUCCESS : EXIT_FAILURE;
}
