#include "ops/bounded.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>

#include "core/pause.h"
#include "simd/call.h"

namespace ambidex {
namespace {

using Clock = std::chrono::steady_clock;

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2OfE = 1.44269504088896341f;
constexpr std::int32_t kKeepAll = std::numeric_limits<std::int16_t>::min();

// As in attention.cpp; a scan reads fewer bytes of a key, so a part has more of them.
constexpr std::size_t kTasksPerThread = 16;
constexpr std::size_t kLeastKeys = 512;
// Codes that are held at once, 8 MiB: what the second caches of a few cores hold, and 8 groups of 128K keys and 4 heads.
constexpr std::size_t kCodesOfWave = std::size_t{1} << 22;
constexpr float kMostExponent = 100.0f;
// What fp32 may take from the weights of keys that were left out, a sum of positive terms.
constexpr float kSumRounding = 1e-5f;
// What is left out must not depend on who is faster, so whoever attends elsewhere is waited for. That is an accelerator's
// own part of a layer, some tens of microseconds; one that takes this long is lost.
constexpr std::chrono::milliseconds kWaitOther{500};
constexpr int kPausesPerReading = 64;

std::size_t low_byte(std::int32_t code) { return static_cast<std::uint8_t>(code); }
std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// log2(2^a + 2^b)
float add_in_log2(float a, float b) {
  const float top = std::max(a, b), low = std::min(a, b);
  if (!(low > kNothing)) return std::isnan(low) ? low : top;
  return top + std::log2(1.0f + std::exp2(low - top));
}

// What a key counts whose code lies so far below the top, in units of 2^(top / kCodesPerUnit), at most: its score is less
// than the next code.
const std::array<float, kNumCounts>& weights() {
  static const std::array<float, kNumCounts> table = [] {
    std::array<float, kNumCounts> found{};
    for (std::size_t depth = 0; depth < kNumCounts; ++depth) {
      const double units = (1.0 - static_cast<double>(depth)) / kCodesPerUnit;
      found[depth] = static_cast<float>(std::exp2(units) * (1.0 + 1e-6));
    }
    return found;
  }();
  return table;
}

}  // namespace

// Defined in bounded-inl.h.
#define AMBIDEX_DECLARE_BOUNDED(isa)                                                           \
  namespace isa {                                                                              \
  void scan_range(const BoundedCall& call, const ScanRange& range, char* workspace);           \
  void keep_range(const BoundedCall& call, const KeepRange& range, char* workspace);           \
  std::size_t bounded_workspace_bytes(const BoundedCall& call, std::size_t rows);              \
  BoundedForm make_bounded_form() {                                                            \
    return {&scan_range, &keep_range, &bounded_workspace_bytes};                               \
  }                                                                                            \
  }
AMBIDEX_DECLARE_BOUNDED(generic)
AMBIDEX_DECLARE_BOUNDED(avx2)
AMBIDEX_DECLARE_BOUNDED(avx512)
AMBIDEX_DECLARE_BOUNDED(avx512bf16)
AMBIDEX_DECLARE_BOUNDED(amx)
#undef AMBIDEX_DECLARE_BOUNDED

BoundedForm bounded_form(Isa isa) { AMBIDEX_CALL(isa, make_bounded_form); }

void BoundedPool::attend(const BoundedForm& form, const BoundedCall& call, const KeyBatch& batch) {
  std::lock_guard<std::mutex> lock(threads_.mutex());
  call_ = &call;
  form_ = form;
  plan(call, batch);
  reserve(form, call, batch);
  for (std::size_t first = 0; first < groups_.size();) {
    std::size_t last = first, num_codes = 0;
    do {
      num_codes += groups_[last].num_pieces * groups_[last].rows * 64;
      ++last;
    } while (last < groups_.size() &&
             num_codes + groups_[last].num_pieces * groups_[last].rows * 64 <= kCodesOfWave);
    run_wave(first, last);
    first = last;
  }
}

std::array<double, kNumBoundedPhases> BoundedPool::take_phase_seconds() {
  std::lock_guard<std::mutex> lock(threads_.mutex());
  std::array<double, kNumBoundedPhases> seconds{};
  for (Workspace& workspace : workspaces_) {
    for (std::size_t i = 0; i < kNumBoundedPhases; ++i) {
      seconds[i] += std::chrono::duration<double>(workspace.spent[i]).count();
    }
    workspace.spent = {};
  }
  return seconds;
}

void BoundedPool::reserve(const BoundedForm& form, const BoundedCall& call, const KeyBatch& batch) {
  const std::size_t needed = form.workspace_bytes(call, batch.most_rows() * call.scan.group_size);
  workspaces_.resize(threads_.num_threads());
  for (Workspace& workspace : workspaces_) workspace.bytes.reserve(needed);
}

void BoundedPool::plan(const BoundedCall& call, const KeyBatch& batch) {
  groups_.clear();
  std::size_t num_keys = 0;
  for (const KeyBatch::Request& request : batch.requests()) num_keys += request.num_rows > 0 ? request.num_keys : 0;
  const std::size_t share = ceil_div(num_keys * call.scan.num_kv_heads, threads_.num_threads() * kTasksPerThread);
  keys_per_part_ = std::clamp(share, kLeastKeys, kMostKeysOfTask);
  for (const KeyBatch::Request& request : batch.requests()) {
    if (request.num_rows == 0) continue;
    if (request.num_keys == 0) {
      answer_empty(call, request);
      continue;
    }
    for (std::size_t kv_head = 0; kv_head < call.scan.num_kv_heads; ++kv_head) {
      Group group{};
      group.request = request;
      group.kv_head = kv_head;
      group.rows = request.num_rows * call.scan.group_size;
      group.base = request.first_key / 64 * 64;
      group.num_pieces = ceil_div(request.first_key + request.num_keys - group.base, 64);
      group.num_parts = count_parts(request.num_keys);
      group.block_ids = batch.block_ids() + request.first_block;
      groups_.push_back(group);
    }
  }
}

// As many for each thread, where there are about as many as threads or more and they do not become too short.
std::size_t BoundedPool::count_parts(std::size_t num_keys) const {
  const std::size_t num = ceil_div(num_keys, keys_per_part_), threads = threads_.num_threads();
  const std::size_t rounds = (num + threads / 2) / threads;
  return rounds == 0 || num_keys < rounds * threads * kLeastKeys / 2 ? num : rounds * threads;
}

// Cuts the groups of a wave into parts, at multiples of 64 keys, so that no tile is read twice, and deals them out: the same
// thread is to keep from the codes that it wrote, while they are in its caches.
void BoundedPool::deal(std::size_t first, std::size_t last) {
  const std::size_t threads = threads_.num_threads();
  std::size_t dealt = 0;
  const auto for_parts = [&](const auto& use) {
    dealt = 0;
    for (std::size_t i = first; i < last; ++i) {
      const std::size_t num = groups_[i].num_parts;
      for (std::size_t part = 0; part < num; ++part) {
        use(num % threads == 0 ? part * threads / num : (dealt + part) % threads, i, part);
      }
      dealt += num % threads;
    }
  };
  first_tasks_.assign(threads + 1, 0);
  for_parts([&](std::size_t owner, std::size_t, std::size_t) { ++first_tasks_[owner + 1]; });
  std::size_t most = 0;
  for (std::size_t i = 0; i < threads; ++i) {
    most = std::max(most, first_tasks_[i + 1]);
    first_tasks_[i + 1] += first_tasks_[i];
  }
  tasks_.resize(first_tasks_[threads]);
  claims_of_owner_ = ceil_div(most, kLineBytes / sizeof(Claim)) * (kLineBytes / sizeof(Claim));
  claims_.reserve(threads * claims_of_owner_);
  for (std::size_t i = 0; i < threads * claims_of_owner_; ++i) new (claims_.data() + i) Claim{{false}, {false}};
  for_parts([&](std::size_t owner, std::size_t group, std::size_t part) {
    const KeyBatch::Request& request = groups_[group].request;
    const std::size_t num = groups_[group].num_parts, end = request.first_key + request.num_keys;
    const auto cut = [&](std::size_t i) {
      return i == 0 ? request.first_key : i == num ? end : (request.first_key + request.num_keys * i / num) / 64 * 64;
    };
    tasks_[first_tasks_[owner]++] = {group, part, cut(part), cut(part + 1) - cut(part)};
  });
  for (std::size_t i = threads; i > 0; --i) first_tasks_[i] = first_tasks_[i - 1];
  first_tasks_[0] = 0;
}

// Lays the wave's numbers out and lets the threads go.
void BoundedPool::run_wave(std::size_t first, std::size_t last) {
  std::size_t num_codes = 0, num_bytes = 0;
  if (progress_capacity_ < last - first) {
    progress_ = std::make_unique<Progress[]>(last - first);
    progress_capacity_ = last - first;
  }
  first_group_ = first;
  for (std::size_t i = first; i < last; ++i) {
    Group& group = groups_[i];
    group.first_code = num_codes;
    group.first_byte = num_bytes;
    num_codes += group.num_pieces * group.rows * 64;
    num_bytes += places(group, nullptr).num_bytes;
    Progress& progress = progress_[i - first];
    progress.num_unscanned.store(group.num_parts, std::memory_order_relaxed);
    progress.num_unkept.store(group.num_parts, std::memory_order_relaxed);
    progress.is_chosen.store(false, std::memory_order_relaxed);
  }
  deal(first, last);
  codes_.reserve(num_codes);
  if (call_->rows == nullptr) scores_.reserve(num_codes);
  places_.reserve(num_bytes);
  const auto work = [](void* self, std::size_t thread) { static_cast<BoundedPool*>(self)->work(thread); };
  if (tasks_.size() == 1) {
    work(this, 0);
  } else {
    threads_.run_shared(work, this);
  }
}

// Scans its own parts, and keeps from those whose group is chosen by then; then what is left of others' parts, and of its
// own. Nobody waits for what has no thread: before it waits for a threshold, all scans were begun.
void BoundedPool::work(std::size_t thread) {
  const std::size_t threads = threads_.num_threads();
  const auto num_tasks = [&](std::size_t owner) { return first_tasks_[owner + 1] - first_tasks_[owner]; };
  std::size_t next_keep = 0;
  for (std::size_t i = 0; i < num_tasks(thread); ++i) {
    try_scan(thread, i, thread);
    while (next_keep <= i && is_chosen(thread, next_keep)) try_keep(thread, next_keep++, thread);
  }
  for (std::size_t other = 1; other < threads; ++other) {
    const std::size_t owner = (thread + other) % threads;
    for (std::size_t i = num_tasks(owner); i > 0; --i) try_scan(owner, i - 1, thread);
  }
  while (next_keep < num_tasks(thread)) try_keep(thread, next_keep++, thread);
  for (std::size_t other = 1; other < threads; ++other) {
    const std::size_t owner = (thread + other) % threads;
    for (std::size_t i = num_tasks(owner); i > 0; --i) try_keep(owner, i - 1, thread);
  }
}

bool BoundedPool::is_chosen(std::size_t owner, std::size_t i) const {
  return progress_[task(owner, i).group - first_group_].is_chosen.load(std::memory_order_acquire);
}

void BoundedPool::try_scan(std::size_t owner, std::size_t i, std::size_t thread) {
  std::atomic<bool>& is_scanned = claim(owner, i).is_scanned;
  if (is_scanned.load(std::memory_order_relaxed) || is_scanned.exchange(true, std::memory_order_relaxed)) return;
  auto& spent = workspaces_[thread].spent;
  const Task& of = task(owner, i);
  const Clock::time_point start = Clock::now();
  scan(of, thread);
  const Clock::time_point end = Clock::now();
  spent[kScanning] += end - start;
  Progress& progress = progress_[of.group - first_group_];
  if (progress.num_unscanned.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  choose(groups_[of.group]);
  progress.is_chosen.store(true, std::memory_order_release);
  spent[kChoosing] += Clock::now() - end;
}

// Waits for the group's thresholds.
void BoundedPool::try_keep(std::size_t owner, std::size_t i, std::size_t thread) {
  std::atomic<bool>& is_kept = claim(owner, i).is_kept;
  if (is_kept.load(std::memory_order_relaxed) || is_kept.exchange(true, std::memory_order_relaxed)) return;
  auto& spent = workspaces_[thread].spent;
  const Task& of = task(owner, i);
  const Clock::time_point start = Clock::now();
  while (!is_chosen(owner, i)) pause();
  const Clock::time_point chosen = Clock::now();
  spent[kWaiting] += chosen - start;
  keep(of, thread);
  if (progress_[of.group - first_group_].num_unkept.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    write(groups_[of.group]);
  }
  spent[kKeeping] += Clock::now() - chosen;
}

BoundedPool::Places BoundedPool::places(const Group& group, char* base) const {
  const std::size_t parts = group.num_parts, rows = group.rows;
  Places at{};
  std::size_t used = 0;
  const auto take = [&](auto** to, std::size_t num) {
    using Place = std::remove_reference_t<decltype(**to)>;
    *to = base == nullptr ? nullptr : reinterpret_cast<Place*>(base + used);
    used += ceil_div(num * sizeof(Place), 64) * 64;
  };
  take(&at.tops, parts * rows);
  for (float** to : {&at.lowers, &at.shifts}) take(to, parts * rows);
  take(&at.value_norms, parts);
  take(&at.counts, parts * rows * kNumCounts);
  for (std::int32_t** to : {&at.all_tops, &at.thresholds}) take(to, rows);
  for (float** to : {&at.others, &at.dropped}) take(to, rows);
  take(&at.outs, parts * rows * call_->scan.tiles.padded_dim);
  for (float** to : {&at.tops_kept, &at.sums, &at.spared}) take(to, parts * rows);
  take(&at.num_kept, parts);
  at.num_bytes = used;
  return at;
}

AttendRange BoundedPool::range_of(const Group& group, const Task& task) const {
  return {group.block_ids, group.kv_head, group.request.first_row, group.request.num_rows,
          task.first_key,  task.num_keys, nullptr,                 nullptr, 0};
}

void BoundedPool::scan(const Task& task, std::size_t thread) {
  const Group& group = groups_[task.group];
  const Places at = places(group, places_.data() + group.first_byte);
  const std::size_t first = task.part * group.rows;
  form_.scan(*call_,
             {range_of(group, task), group.base, codes_.data() + group.first_code,
              call_->rows == nullptr ? scores_.data() + group.first_code : nullptr, at.tops + first, at.lowers + first,
              at.shifts + first, at.counts + first * kNumCounts, at.value_norms + task.part},
             workspaces_[thread].bytes.data());
}

void BoundedPool::keep(const Task& task, std::size_t thread) {
  const Group& group = groups_[task.group];
  const Places at = places(group, places_.data() + group.first_byte);
  const std::size_t first = task.part * group.rows;
  form_.keep(*call_,
             {range_of(group, task), group.base, codes_.data() + group.first_code,
              call_->rows == nullptr ? scores_.data() + group.first_code : nullptr, at.thresholds, at.all_tops,
              weights().data(), at.outs + first * call_->scan.tiles.padded_dim, at.tops_kept + first, at.sums + first,
              at.spared + first, at.num_kept + task.part},
             workspaces_[thread].bytes.data());
}

std::size_t BoundedPool::place_of(const Group& group, std::size_t row) const {
  const std::size_t group_size = call_->scan.group_size;
  const std::size_t token = group.request.first_row + row / group_size;
  return (token * call_->scan.num_kv_heads + group.kv_head) * group_size + row % group_size;
}

// Waits for whoever attends elsewhere; false: nobody does, or it took too long and does not count.
bool BoundedPool::wait_other() const {
  if (call_->other_lse == nullptr) return false;
  const auto end = std::chrono::steady_clock::now() + kWaitOther;
  do {
    for (int i = 0; i < kPausesPerReading; ++i) {
      if (__atomic_load_n(call_->other_word, __ATOMIC_ACQUIRE) != 0) return true;
      pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void BoundedPool::choose(const Group& group) {
  const Places at = places(group, places_.data() + group.first_byte);
  const bool has_other = wait_other();
  for (std::size_t row = 0; row < group.rows; ++row) {
    std::int32_t top = at.tops[row];
    for (std::size_t part = 1; part < group.num_parts; ++part) top = std::max(top, at.tops[part * group.rows + row]);
    float lower = 0.0f;
    for (std::size_t part = 0; part < group.num_parts; ++part) {
      const std::size_t i = part * group.rows + row;
      lower += at.lowers[i] * std::exp2(static_cast<float>(at.tops[i] - top) / kCodesPerUnit);
    }
    const float anchor = static_cast<float>(top) / kCodesPerUnit;
    at.all_tops[row] = top;
    at.others[row] = has_other ? call_->other_lse[place_of(group, row)] * kLog2OfE : kNothing;
    // What may be left out, in units of 2^anchor; NaN, where nothing may, fails the comparisons.
    float whole = add_in_log2(anchor + std::log2(lower), at.others[row]);
    if (call_->near_lse != nullptr) whole = add_in_log2(whole, call_->near_lse[place_of(group, row)] * kLog2OfE);
    const float limit = call_->max_mass * (1.0f - 0x1p-12f) * std::exp2(std::min(whole - anchor, kMostExponent));
    find_threshold(group, at, row, limit > 0.0f && std::isfinite(limit) && !std::isnan(whole) ? limit : 0.0f);
  }
}

// The highest threshold below which keys count the limit at most, by the counts of all parts.
void BoundedPool::find_threshold(const Group& group, const Places& at, std::size_t row, float limit) const {
  at.thresholds[row] = kKeepAll;
  at.dropped[row] = 0.0f;
  if (!(limit > 0.0f)) return;
  const std::int32_t top = at.all_tops[row], deepest = static_cast<std::int32_t>(kNumCounts) - 1;
  std::uint32_t counts[kNumCounts] = {};
  for (std::size_t part = 0; part < group.num_parts; ++part) {
    const std::size_t i = part * group.rows + row;
    const std::uint16_t* own = at.counts + i * kNumCounts;
    // Other threads wrote them: of the next row, which lie elsewhere for each part, they are fetched meanwhile.
    if (row + 1 < group.rows) {
      for (std::size_t k = 0; k < kNumCounts; k += kLineBytes / sizeof *own) __builtin_prefetch(own + kNumCounts + k);
    }
    for (std::size_t k = 0; k < kNumCounts; ++k) counts[k] += own[k];
    // Codes that are the part's deepest, but lie deeper than that below the top of all.
    for (std::int32_t code = at.tops[i] - deepest; code < std::min(top - deepest, at.tops[i] + 1); ++code) {
      counts[low_byte(code)] -= own[low_byte(code)];
      counts[low_byte(top - deepest)] += own[low_byte(code)];
    }
  }
  float sum = 0.0f;
  std::size_t num_depths = kNumCounts;  // that are kept
  for (; num_depths > 0; --num_depths) {
    const float more = sum + static_cast<float>(counts[low_byte(top + 1 - static_cast<std::int32_t>(num_depths))]) *
                             weights()[num_depths - 1];
    if (!(more * (1.0f + kSumRounding) <= limit)) break;
    sum = more;
  }
  if (num_depths == kNumCounts) return;
  at.thresholds[row] = top + 1 - static_cast<std::int32_t>(num_depths);
  at.dropped[row] = sum;
}

void BoundedPool::write(const Group& group) {
  const Places at = places(group, places_.data() + group.first_byte);
  float num_kept = 0.0f, value_norm = 0.0f;
  for (std::size_t part = 0; part < group.num_parts; ++part) num_kept += at.num_kept[part];
  for (std::size_t part = 0; part < group.num_parts; ++part) {
    const float norm = at.value_norms[part];
    value_norm = norm > value_norm || std::isnan(norm) ? norm : value_norm;
  }
  for (std::size_t row = 0; row < group.rows; ++row) write_row(group, at, row, num_kept, value_norm);
}

// Joins the parts and what was seen elsewhere, and says what was left out.
void BoundedPool::write_row(const Group& group, const Places& at, std::size_t row, float num_kept, float value_norm) {
  const BoundedCall& call = *call_;
  const std::size_t dim = call.scan.head_dim, padded = call.scan.tiles.padded_dim, rows = group.rows;
  const std::size_t place = place_of(group, row);
  const bool joins = call.near_lse != nullptr;
  const float near = joins ? call.near_lse[place] * kLog2OfE : kNothing;
  float top = near, spared = 0.0f, shift = 0.0f;
  for (std::size_t part = 0; part < group.num_parts; ++part) {
    const float part_top = at.tops_kept[part * rows + row];
    top = part_top > top || std::isnan(part_top) ? part_top : top;
    spared += at.spared[part * rows + row];
  }
  for (std::size_t part = 0; part < group.num_parts; ++part) shift = std::max(shift, at.shifts[part * rows + row]);
  float* out = call.scan.out + place * dim;
  const float* near_out = joins ? call.near_out + place * dim : nullptr;
  const float near_weight = near == kNothing ? 0.0f : std::exp2(near - top);
  for (std::size_t d = 0; d < dim; ++d) out[d] = near_weight == 0.0f ? 0.0f : near_weight * near_out[d];
  float sum = near_weight;
  for (std::size_t part = 0; part < group.num_parts; ++part) {
    if (at.num_kept[part] == 0.0f) continue;
    const float weight = std::exp2(at.tops_kept[part * rows + row] - top);
    sum += weight * at.sums[part * rows + row];
    const float* from = at.outs + (part * rows + row) * padded;
    for (std::size_t d = 0; d < dim; ++d) out[d] += weight * from[d];
  }
  float norm = 0.0f;
  for (std::size_t d = 0; d < dim; ++d) {
    out[d] = sum == 0.0f ? 0.0f : out[d] / sum;
    norm += out[d] * out[d];
  }
  call.scan.lse[place] = sum == 0.0f ? kNothing : (top + std::log2(sum)) / kLog2OfE;
  // Of the softmax over all keys: N / (Z + N), N that of those left out, at most.
  const float dropped = std::max(at.dropped[row] - spared, 0.0f) + kSumRounding * at.dropped[row];
  float mass = 0.0f;
  if (dropped > 0.0f && num_kept < static_cast<float>(group.request.num_keys)) {
    const float anchor = static_cast<float>(at.all_tops[row]) / kCodesPerUnit;
    const float whole = add_in_log2(top + std::log2(sum), at.others[row]);
    mass = 1.0f / (1.0f + std::exp2(whole - anchor) / dropped);
  }
  const float blur = call.rows == nullptr ? std::expm1(2.0f * shift / kLog2OfE) : 0.0f;
  float* figures = call.figures + place * kNumBoundedFigures;
  figures[kDroppedMass] = mass;
  figures[kErrorShare] = mass + blur;
  figures[kValueNorm] = value_norm;
  figures[kOutNorm] = std::sqrt(norm);
  figures[kNumKept] = num_kept;
}

void BoundedPool::answer_empty(const BoundedCall& call, const KeyBatch::Request& request) const {
  const std::size_t num_q_heads = call.scan.num_kv_heads * call.scan.group_size, dim = call.scan.head_dim;
  for (std::size_t i = request.first_row * num_q_heads; i < (request.first_row + request.num_rows) * num_q_heads; ++i) {
    const bool joins = call.near_lse != nullptr;
    float norm = 0.0f;
    for (std::size_t d = 0; d < dim; ++d) {
      const float x = joins ? call.near_out[i * dim + d] : 0.0f;
      call.scan.out[i * dim + d] = x;
      norm += x * x;
    }
    call.scan.lse[i] = joins ? call.near_lse[i] : kNothing;
    float* figures = call.figures + i * kNumBoundedFigures;
    std::fill_n(figures, static_cast<std::size_t>(kNumBoundedFigures), 0.0f);
    figures[kOutNorm] = std::sqrt(norm);
  }
}

}  // namespace ambidex
