#include "ops/bounded.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <thread>

#include "core/pause.h"
#include "simd/call.h"

namespace ambidex {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2OfE = 1.44269504088896341f;

// As in attention.cpp; a scan reads fewer bytes of a key, so a task has more of them.
constexpr std::size_t kTasksPerThread = 16;
constexpr std::size_t kLeastKeys = 512;
// Upper scores that are held at once, 16 MiB: what the second caches of a few cores hold, and 64 groups of 16K keys and 4
// heads.
constexpr std::size_t kScoresOfWave = std::size_t{1} << 22;
// A part of a group's own for the keys that go in if rounding stands in the way of its threshold: all that are left.
constexpr std::size_t kRepairs = 1;

// Thresholds lie kBinsPerUnit to a factor of 2, from the largest score down to 2^-32 of it. A sample of the scores would
// not do: what may be left out is often a few of the likelier keys.
constexpr float kBinsPerUnit = 16.0f;
constexpr std::size_t kNumBins = 512;
constexpr float kLastBin = 511.0f;
constexpr std::size_t kCountsAtOnce = 4;  // independent ones, so that keys of one bin do not wait for each other
// Σ 2^(u - anchor) of what is dropped is a difference of two sums in fp32 of up to 2^20 numbers, in 16 lanes and many
// parts: 2^-16 of the larger one holds what they round by.
constexpr float kSumRounding = 0x1p-16f;
constexpr float kMostExponent = 100.0f;
// What is left out must not depend on who is faster, so whoever attends elsewhere is waited for. That is an accelerator's
// own part of a layer, some tens of microseconds; one that takes this long is lost.
constexpr std::chrono::milliseconds kWaitOther{500};
constexpr int kPausesPerReading = 64;

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// How many of some upper scores lie how far below the largest of them, in bins; the last bin has all that lie farther. NaN
// is counted there, too: a limit that NaN has gone into lets nothing be left out.
void count_scores(const float* scores, std::size_t num, float top, float* counts) {
  std::uint32_t found[kCountsAtOnce][kNumBins] = {};
  std::int32_t bins[64];
  for (std::size_t begin = 0; begin < num; begin += 64) {
    for (std::size_t i = 0; i < 64; ++i) {
      const float bin = (top - scores[begin + i]) * kBinsPerUnit;
      bins[i] = static_cast<std::int32_t>(bin < kLastBin ? bin : kLastBin);
    }
    for (std::size_t i = 0; i < 64; i += kCountsAtOnce) {
      for (std::size_t k = 0; k < kCountsAtOnce; ++k) ++found[k][bins[i + k]];
    }
  }
  for (std::size_t bin = 0; bin < kNumBins; ++bin) {
    counts[bin] = static_cast<float>(found[0][bin] + found[1][bin] + found[2][bin] + found[3][bin]);
  }
}

// log2(2^a + 2^b)
float add_in_log2(float a, float b) {
  const float top = std::max(a, b), low = std::min(a, b);
  if (!(low > kNothing)) return std::isnan(low) ? low : top;
  return top + std::log2(1.0f + std::exp2(low - top));
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
  const std::size_t needed = form.workspace_bytes(call, batch.most_rows() * call.scan.group_size);
  workspaces_.resize(threads_.num_threads());
  for (Workspace& workspace : workspaces_) {
    if (workspace.size >= needed) continue;
    workspace.bytes = std::make_unique<char[]>(needed + 64);
    workspace.size = needed;
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.bytes.get());
    workspace.begin = workspace.bytes.get() + (64 - address % 64) % 64;
  }
  const std::vector<Group>& groups = groups_;
  for (std::size_t first = 0; first < groups.size();) {
    std::size_t last = first + 1, num_scores = groups[first].rows * groups[first].stride;
    while (last < groups.size() && num_scores + groups[last].rows * groups[last].stride <= kScoresOfWave) {
      num_scores += groups[last].rows * groups[last].stride;
      ++last;
    }
    first_group_ = first;
    num_groups_ = last - first;
    run_wave();
    first = last;
  }
}

void BoundedPool::plan(const BoundedCall& call, const KeyBatch& batch) {
  groups_.clear();
  tasks_.clear();
  std::size_t num_keys = 0;
  for (const KeyBatch::Request& request : batch.requests()) num_keys += request.num_rows > 0 ? request.num_keys : 0;
  std::size_t keys_per_task = ceil_div(num_keys * call.scan.num_kv_heads, threads_.num_threads() * kTasksPerThread);
  keys_per_task = ceil_div(std::max(keys_per_task, kLeastKeys), 64) * 64;
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
      group.stride = ceil_div(request.first_key + request.num_keys - group.base, 64) * 64;
      group.first_task = tasks_.size();
      group.num_tasks = ceil_div(request.num_keys, keys_per_task);
      group.block_ids = batch.block_ids() + request.first_block;
      const std::size_t end = request.first_key + request.num_keys;
      std::size_t begin = request.first_key;
      for (std::size_t part = 0; part < group.num_tasks; ++part) {
        // Cut at multiples of 64 keys, so that no tile is read twice.
        const std::size_t cut = (request.first_key + request.num_keys * (part + 1) / group.num_tasks) / 64 * 64;
        const std::size_t stop = part + 1 == group.num_tasks ? end : cut;
        tasks_.push_back({groups_.size(), part, begin, stop - begin});
        begin = stop;
      }
      groups_.push_back(group);
    }
  }
}

// Lays the wave's numbers out and lets the threads go: all scans, then all keeps, each when its group is chosen.
void BoundedPool::run_wave() {
  std::size_t num_scores = 0, num_floats = 0;
  for (std::size_t i = first_group_; i < first_group_ + num_groups_; ++i) {
    Group& group = groups_[i];
    group.first_score = num_scores;
    group.first_float = num_floats;
    num_scores += group.rows * group.stride;
    num_floats += places(group, nullptr).num_floats;
  }
  if (scores_.size() < num_scores) scores_.resize(num_scores);
  if (floats_.size() < num_floats) floats_.resize(num_floats);
  if (progress_capacity_ < num_groups_) {
    progress_ = std::make_unique<Progress[]>(num_groups_);
    progress_capacity_ = num_groups_;
  }
  num_tasks_ = 0;
  for (std::size_t i = 0; i < num_groups_; ++i) {
    const std::size_t tasks = groups_[first_group_ + i].num_tasks;
    progress_[i].num_unscanned.store(tasks, std::memory_order_relaxed);
    progress_[i].num_unkept.store(tasks, std::memory_order_relaxed);
    progress_[i].is_chosen.store(false, std::memory_order_relaxed);
    num_tasks_ += tasks;
  }
  next_.store(0, std::memory_order_relaxed);
  const auto work = [](void* self, std::size_t thread) { static_cast<BoundedPool*>(self)->work(thread); };
  if (num_tasks_ == 1) {
    work(this, 0);
  } else {
    threads_.run_shared(work, this);
  }
}

void BoundedPool::work(std::size_t thread) {
  const Task* tasks = tasks_.data() + groups_[first_group_].first_task;
  for (;;) {
    const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= 2 * num_tasks_) return;
    const Task& task = tasks[i < num_tasks_ ? i : i - num_tasks_];
    Progress& progress = progress_[task.group - first_group_];
    const Group& group = groups_[task.group];
    if (i < num_tasks_) {
      scan(task, thread);
      if (progress.num_unscanned.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      choose(group);
      progress.is_chosen.store(true, std::memory_order_release);
    } else {
      // Every scan was begun before the first keep: nobody waits for what has no thread.
      while (!progress.is_chosen.load(std::memory_order_acquire)) pause();
      keep(task, thread);
      if (progress.num_unkept.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(group, thread);
    }
  }
}

BoundedPool::Places BoundedPool::places(const Group& group, float* base) const {
  const std::size_t parts = group.num_tasks, kept_parts = parts + kRepairs, rows = group.rows;
  Places at{};
  std::size_t used = 0;
  const auto take = [&](float** to, std::size_t num) {
    *to = base == nullptr ? nullptr : base + used;
    used += (num + 15) / 16 * 16;
  };
  for (float** to : {&at.tops, &at.uppers, &at.lowers, &at.shifts}) take(to, parts * rows);
  take(&at.value_norms, parts);
  take(&at.counts, parts * rows * kNumBins);
  for (float** to : {&at.anchors, &at.others, &at.limits, &at.thresholds, &at.before}) take(to, rows);
  take(&at.outs, kept_parts * rows * call_->scan.tiles.padded_dim);
  for (float** to : {&at.keep_tops, &at.sums, &at.kept}) take(to, kept_parts * rows);
  take(&at.num_kept, kept_parts);
  at.num_floats = used;
  return at;
}

AttendRange BoundedPool::range_of(const Group& group) const {
  return {group.block_ids,          group.kv_head, group.request.first_row, group.request.num_rows,
          group.request.first_key, group.request.num_keys, nullptr, nullptr, 0};
}

void BoundedPool::scan(const Task& task, std::size_t thread) {
  const Group& group = groups_[task.group];
  const Places at = places(group, floats_.data() + group.first_float);
  AttendRange keys = range_of(group);
  keys.first_key = task.first_key;
  keys.num_keys = task.num_keys;
  const std::size_t first = task.part * group.rows;
  form_.scan(*call_,
             {keys, scores_.data() + group.first_score, group.base, group.stride, at.tops + first, at.uppers + first,
              at.lowers + first, at.shifts + first, at.value_norms + task.part},
             workspaces_[thread].begin);
  for (std::size_t row = 0; row < group.rows; ++row) {
    count_scores(scores_.data() + group.first_score + row * group.stride + (task.first_key / 64 * 64 - group.base),
                 (task.first_key % 64 + task.num_keys + 63) / 64 * 64, at.tops[first + row],
                 at.counts + (first + row) * kNumBins);
  }
}

KeepRange BoundedPool::keep_range(const Group& group, const Places& at, std::size_t part) const {
  const std::size_t first = part * group.rows;
  return {range_of(group),
          scores_.data() + group.first_score,
          group.base,
          group.stride,
          at.thresholds,
          nullptr,
          at.anchors,
          at.outs + first * call_->scan.tiles.padded_dim,
          at.keep_tops + first,
          at.sums + first,
          at.kept + first,
          at.num_kept + part};
}

void BoundedPool::keep(const Task& task, std::size_t thread) {
  const Group& group = groups_[task.group];
  KeepRange range = keep_range(group, places(group, floats_.data() + group.first_float), task.part);
  range.keys.first_key = task.first_key;
  range.keys.num_keys = task.num_keys;
  form_.keep(*call_, range, workspaces_[thread].begin);
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
  const Places at = places(group, floats_.data() + group.first_float);
  const bool has_other = wait_other();
  for (std::size_t row = 0; row < group.rows; ++row) {
    float anchor = kNothing;
    for (std::size_t part = 0; part < group.num_tasks; ++part) {
      anchor = std::max(anchor, at.tops[part * group.rows + row]);
    }
    float upper = 0.0f, lower = 0.0f;
    for (std::size_t part = 0; part < group.num_tasks; ++part) {
      const std::size_t i = part * group.rows + row;
      upper += at.uppers[i] * std::exp2(at.tops[i] - anchor);
      lower += at.lowers[i] * std::exp2(at.tops[i] - anchor);
    }
    at.anchors[row] = anchor;
    at.others[row] = has_other ? call_->other_lse[place_of(group, row)] * kLog2OfE : kNothing;
    at.uppers[row] = upper;  // of part 0, and from here on of all
    // What may be dropped, in units of 2^anchor: 0 unless it is more than sums can be off by. NaN fails the comparison.
    float whole = add_in_log2(anchor + std::log2(lower), at.others[row]);
    if (call_->near_lse != nullptr) whole = add_in_log2(whole, call_->near_lse[place_of(group, row)] * kLog2OfE);
    const float allowed = call_->max_mass * (1.0f - 0x1p-12f) * std::exp2(std::min(whole - anchor, kMostExponent));
    const float limit = allowed - kSumRounding * upper;
    at.limits[row] = limit > 0.0f && std::isfinite(limit) ? limit : 0.0f;
    at.thresholds[row] = find_threshold(group, at, row);
  }
}

// The highest threshold below which upper scores add up to the limit at most, by counts of each part's scores. A score in
// bin b of a part lies b to b + 1 bins below the part's largest, so rounding the parts' distances up to whole bins leaves no
// key that is below a threshold out of the sum, and takes each for at most one bin larger than it is.
float BoundedPool::find_threshold(const Group& group, const Places& at, std::size_t row) const {
  const float anchor = at.anchors[row];
  if (!(at.limits[row] > 0.0f)) return kNothing;
  float counts[kNumBins] = {};
  for (std::size_t part = 0; part < group.num_tasks; ++part) {
    const std::size_t i = part * group.rows + row;
    const float distance = std::ceil((anchor - at.tops[i]) * kBinsPerUnit);
    const std::size_t shift = distance < kNumBins ? static_cast<std::size_t>(distance) : kNumBins - 1;
    const float* own = at.counts + i * kNumBins;
    for (std::size_t bin = 0; bin + shift < kNumBins; ++bin) counts[bin + shift] += own[bin];
    for (std::size_t bin = kNumBins - shift; bin < kNumBins; ++bin) counts[kNumBins - 1] += own[bin];
  }
  float sum = 0.0f;
  std::size_t bin = kNumBins;
  while (bin > 0) {
    sum += counts[bin - 1] * std::exp2(-(static_cast<float>(bin) - 2.0f) / kBinsPerUnit);
    if (!(sum <= at.limits[row])) break;
    --bin;
  }
  return anchor - static_cast<float>(bin) / kBinsPerUnit;
}

void BoundedPool::finish(const Group& group, std::size_t thread) {
  const Places at = places(group, floats_.data() + group.first_float);
  std::size_t num_parts = group.num_tasks;
  for (std::size_t repair = 0; repair < kRepairs; ++repair) {
    bool is_kept = true;
    for (std::size_t row = 0; row < group.rows; ++row) {
      float kept = 0.0f;
      for (std::size_t part = 0; part < num_parts; ++part) kept += at.kept[part * group.rows + row];
      is_kept = is_kept && (at.thresholds[row] == kNothing || at.uppers[row] - kept <= at.limits[row]);
    }
    if (is_kept) break;
    for (std::size_t row = 0; row < group.rows; ++row) {
      at.before[row] = at.thresholds[row];
      at.thresholds[row] = kNothing;
    }
    KeepRange range = keep_range(group, at, num_parts);
    range.before = at.before;
    form_.keep(*call_, range, workspaces_[thread].begin);
    ++num_parts;
  }
  write(group, num_parts);
}

// Joins the parts and what was seen elsewhere, and says what was left out.
void BoundedPool::write(const Group& group, std::size_t num_parts) {
  const BoundedCall& call = *call_;
  const Places at = places(group, floats_.data() + group.first_float);
  const std::size_t dim = call.scan.head_dim, padded = call.scan.tiles.padded_dim, rows = group.rows;
  float num_kept = 0.0f, value_norm = 0.0f;
  for (std::size_t part = 0; part < num_parts; ++part) num_kept += at.num_kept[part];
  for (std::size_t part = 0; part < group.num_tasks; ++part) {
    const float norm = at.value_norms[part];
    value_norm = norm > value_norm || std::isnan(norm) ? norm : value_norm;
  }
  const bool is_whole = num_kept >= static_cast<float>(group.request.num_keys);
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t place = place_of(group, row);
    const bool joins = call.near_lse != nullptr;
    const float near = joins ? call.near_lse[place] * kLog2OfE : kNothing;
    float top = near, sum = 0.0f, kept = 0.0f, shift = 0.0f;
    for (std::size_t part = 0; part < num_parts; ++part) {
      const float part_top = at.keep_tops[part * rows + row];
      top = part_top > top || std::isnan(part_top) ? part_top : top;
      kept += at.kept[part * rows + row];
    }
    for (std::size_t part = 0; part < group.num_tasks; ++part) shift = std::max(shift, at.shifts[part * rows + row]);
    float* out = call.scan.out + place * dim;
    const float* near_out = joins ? call.near_out + place * dim : nullptr;
    const float near_weight = near == kNothing ? 0.0f : std::exp2(near - top);
    for (std::size_t d = 0; d < dim; ++d) out[d] = near_weight == 0.0f ? 0.0f : near_weight * near_out[d];
    sum = near_weight;
    for (std::size_t part = 0; part < num_parts; ++part) {
      if (at.num_kept[part] == 0.0f) continue;
      const float weight = std::exp2(at.keep_tops[part * rows + row] - top);
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
    float mass = 0.0f;
    if (!is_whole) {
      const float dropped = std::max(at.uppers[row] - kept, 0.0f) + kSumRounding * at.uppers[row];
      const float whole = add_in_log2(top + std::log2(sum), at.others[row]);
      const float ratio = std::exp2(whole - at.anchors[row]) / dropped;  // Z / N
      mass = 1.0f / (1.0f + ratio);
    }
    const float blur = call.rows == nullptr ? std::expm1(2.0f * shift / kLog2OfE) : 0.0f;
    float* figures = call.figures + place * kNumBoundedFigures;
    figures[kDroppedMass] = mass;
    figures[kErrorShare] = mass + blur;
    figures[kValueNorm] = value_norm;
    figures[kOutNorm] = std::sqrt(norm);
    figures[kNumKept] = num_kept;
  }
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
