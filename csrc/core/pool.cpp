#include "core/pool.h"

#include <chrono>

#include "core/check.h"
#include "core/pause.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace ambidex {
namespace {

// A reading of the clock costs about as much as this many pauses.
constexpr int kPausesPerReading = 16;

// Waits a little for other threads; one of them may need this processor.
void wait(int spins) {
  pause();
  if (spins % 1024 == 1023) std::this_thread::yield();
}

std::vector<int> usable_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
  }
#endif
  return cpus;
}

}  // namespace

bool pin_to_cpu([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  return pthread_setaffinity_np(thread.native_handle(), sizeof mask, &mask) == 0;
#else
  return false;
#endif
}

ThreadPool::ThreadPool(std::size_t num_threads, std::size_t spin_us, PinThread pin) : spin_us_(spin_us) {
  AMBIDEX_CHECK(num_threads >= 1 && num_threads <= kEnteredMask, "num_threads: expected 1 to ", kEnteredMask, ", got ",
                num_threads);
  cpus_ = usable_cpus();
  if (cpus_.size() < num_threads) {
    cpus_.clear();
    num_pin_failures_ = num_threads - 1;
  }
  workers_.reserve(num_threads - 1);
  try {
    for (std::size_t i = 1; i < num_threads; ++i) {
      workers_.emplace_back([this, i] { serve(i); });
      if (!cpus_.empty()) num_pin_failures_ += !pin(workers_.back(), cpus_[i]);
    }
  } catch (...) {
    stop();
    throw;
  }
  if (num_pin_failures_ != 0) cpus_.clear();  // a worker may be anywhere: the caller leaves no processor to it
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  is_stopping_.store(true);
  entry_.fetch_add(std::uint64_t{1} << kRoundShift);
  { std::lock_guard<std::mutex> lock(mutex_); }
  woken_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(Work work, void* context) {
  if (workers_.empty()) return work(context, 0);
  begin_round(work, context);
  work(context, 0);
  for (int spins = 0; (entry_.load(std::memory_order_relaxed) & kEnteredMask) != workers_.size(); ++spins) wait(spins);
  end_round();
}

void ThreadPool::run_shared(Work work, void* context) {
  if (workers_.empty()) return work(context, 0);
  begin_round(work, context);
  work(context, 0);
  end_round();
}

void ThreadPool::begin_round(Work work, void* context) {
  leave_worker_cpus();
  work_ = work;
  context_ = context;
  num_left_.store(0, std::memory_order_relaxed);
  // NOTE: sequentially consistent, as is the sleeper's count: either we see the sleeper or it sees the new round.
  entry_.store(((entry_.load() >> kRoundShift) + 1) << kRoundShift);
  if (num_sleeping_.load() != 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    woken_.notify_all();
  }
}

void ThreadPool::end_round() {
  const std::size_t num_entered = entry_.fetch_or(kClosed) & kEnteredMask;
  for (int spins = 0; num_left_.load(std::memory_order_acquire) != num_entered; ++spins) wait(spins);
}

void ThreadPool::serve(std::size_t thread) {
  std::uint64_t seen = 0;
  while (wait_for_round(seen)) {
    if (!try_enter(&seen)) continue;
    work_(context_, thread);
    num_left_.fetch_add(1, std::memory_order_release);
  }
}

// Enters the round in progress, once, unless it is closed; `seen` is then its number.
bool ThreadPool::try_enter(std::uint64_t* seen) {
  std::uint64_t entry = entry_.load();
  while (entry >> kRoundShift != *seen && (entry & kClosed) == 0) {
    if (entry_.compare_exchange_weak(entry, entry + 1)) {
      *seen = entry >> kRoundShift;
      return true;
    }
  }
  *seen = entry >> kRoundShift;
  return false;
}

// False: the pool is being destroyed.
bool ThreadPool::wait_for_round(std::uint64_t seen) {
  // Who was late for the last round may already have taken the number that `stop` made for a round it knows: the end of
  // the pool is looked for beside the number, or such a thread would sleep for ever.
  const auto is_new = [&](std::memory_order order) {
    return entry_.load(order) >> kRoundShift != seen || is_stopping_.load(std::memory_order_relaxed);
  };
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
  do {
    for (int i = 0; i < kPausesPerReading; ++i) {
      if (is_new(std::memory_order_acquire)) return !is_stopping_.load();
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  std::unique_lock<std::mutex> lock(mutex_);
  num_sleeping_.fetch_add(1);
  woken_.wait(lock, [&] { return is_new(std::memory_order_seq_cst); });
  num_sleeping_.fetch_sub(1);
  return !is_stopping_.load();
}

// A caller that happens to run on a worker's processor would share it until the scheduler notices (milliseconds). It is
// moved to the processor that was left free for it; its own mask stays as it was.
void ThreadPool::leave_worker_cpus() const {
#if defined(__linux__)
  if (cpus_.empty()) return;
  const int here = sched_getcpu();
  bool is_taken = false;
  for (std::size_t i = 1; i <= workers_.size(); ++i) is_taken |= cpus_[i] == here;
  if (!is_taken) return;
  cpu_set_t before, free_cpu;
  CPU_ZERO(&free_cpu);
  CPU_SET(cpus_[0], &free_cpu);
  if (sched_getaffinity(0, sizeof before, &before) != 0) return;
  if (sched_setaffinity(0, sizeof free_cpu, &free_cpu) == 0) sched_setaffinity(0, sizeof before, &before);
#endif
}

}  // namespace ambidex
