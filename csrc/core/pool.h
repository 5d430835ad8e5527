// A persistent pool of pinned threads. It is an argument of the ops that use it, never a global.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ambidex {

// Lets a thread run on one processor only; false: the operating system refused.
using PinThread = bool (*)(std::thread& thread, int cpu);
bool pin_to_cpu(std::thread& thread, int cpu);

class ThreadPool {
 public:
  // Starts num_threads - 1 threads; the caller of `run` is the first of the num_threads. Each is pinned to a processor
  // of its own out of those this process may use; if there are fewer of them than threads, or `pin` (a test's may)
  // refuses one, num_pin_failures() says so. A thread spins for spin_us microseconds after its last piece of work, then
  // sleeps: waking a sleeper costs 10-50 us.
  // Throws std::invalid_argument for 0 threads and for more than 32767, std::system_error if one cannot be started.
  ThreadPool(std::size_t num_threads, std::size_t spin_us, PinThread pin = pin_to_cpu);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return workers_.size() + 1; }

  // Threads that wanted a processor of their own and did not get it.
  std::size_t num_pin_failures() const { return num_pin_failures_; }

  using Work = void (*)(void* context, std::size_t thread);

  // Calls work(context, i) once on each thread i, 0 being the caller; returns when all have returned. `work` must not
  // throw. Allocates nothing. One run at a time: its caller holds `mutex()`.
  void run(Work work, void* context);

  // The same for work that the threads share out among themselves: whoever has not begun when the caller is done is not
  // waited for. Another process on a worker's processor then costs its help, not milliseconds.
  void run_shared(Work work, void* context);

  // Held by an op for as long as it uses the threads, and the scratch memory that goes with them.
  std::mutex& mutex() { return use_mutex_; }

 private:
  void stop();
  void begin_round(Work work, void* context);
  void end_round();
  void serve(std::size_t thread);
  bool wait_for_round(std::uint64_t seen);
  bool try_enter(std::uint64_t* seen);
  void leave_worker_cpus() const;

  // The round in progress: its number, whether it takes no more threads, and how many have entered.
  static constexpr std::uint64_t kClosed = 1u << 15;
  static constexpr std::uint64_t kEnteredMask = kClosed - 1;
  static constexpr int kRoundShift = 16;

  // Each on a line of its own: the words that threads spin on.
  alignas(64) std::atomic<std::uint64_t> entry_{kClosed};
  alignas(64) std::atomic<std::size_t> num_left_{0};  // of those that have entered
  alignas(64) std::atomic<std::size_t> num_sleeping_{0};
  std::atomic<bool> is_stopping_{false};
  Work work_ = nullptr;
  void* context_ = nullptr;
  std::mutex use_mutex_;
  std::mutex mutex_;  // of woken_
  std::condition_variable woken_;
  const std::size_t spin_us_;
  std::vector<int> cpus_;  // by thread; empty: not all are pinned
  std::size_t num_pin_failures_ = 0;
  std::vector<std::thread> workers_;
};

}  // namespace ambidex
