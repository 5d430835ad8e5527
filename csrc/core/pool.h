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

class ThreadPool {
 public:
  // Starts num_threads - 1 threads; the caller of `run` is the first of the num_threads. Each is pinned to a processor
  // of its own out of those this process may use, unless there are fewer of them than threads. A thread spins for
  // spin_us microseconds after its last piece of work, then sleeps: waking a sleeper costs 10-50 us.
  // Throws std::invalid_argument for 0 threads, std::system_error if one cannot be started.
  ThreadPool(std::size_t num_threads, std::size_t spin_us);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t num_threads() const { return workers_.size() + 1; }

  // Threads that wanted a processor of their own and did not get it.
  std::size_t num_pin_failures() const { return num_pin_failures_; }

  using Work = void (*)(void* context, std::size_t thread);

  // Calls work(context, i) once on each thread i, 0 being the caller; returns when all have returned. `work` must not
  // throw. Allocates nothing. One `run` at a time: the owner of the pool serialises.
  void run(Work work, void* context);

 private:
  void serve(std::size_t thread);
  bool wait_for_round(std::uint64_t seen);
  void leave_worker_cpus() const;

  // Each on a line of its own: the words that threads spin on.
  alignas(64) std::atomic<std::uint64_t> round_{0};
  alignas(64) std::atomic<std::size_t> num_running_{0};
  alignas(64) std::atomic<std::size_t> num_sleeping_{0};
  std::atomic<bool> is_stopping_{false};
  Work work_ = nullptr;
  void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable woken_;
  const std::size_t spin_us_;
  std::vector<int> cpus_;  // by thread; empty: not pinned
  std::size_t num_pin_failures_ = 0;
  std::vector<std::thread> workers_;
};

}  // namespace ambidex
