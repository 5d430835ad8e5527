// The thread pool under stress: every thread runs every round once, what threads write is seen by the caller, pools of
// all sizes come and go, sleeping workers wake. Then attention calls of several shapes with several callers at a time.
// Meant to be run under -DAMBIDEX_SANITIZE=thread, too.
#include "core/pool.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "ops/attention.h"

namespace {

using namespace ambidex;

// Plain, not atomic: the pool must order them.
struct Counters {
  std::vector<std::size_t> by_thread;
  std::size_t round = 0;
};

int check_rounds(std::size_t num_threads, std::size_t spin_us, std::size_t num_rounds, bool rests,
                 PinThread pin = pin_to_cpu) {
  ThreadPool pool(num_threads, spin_us, pin);
  Counters counters{std::vector<std::size_t>(num_threads), 0};
  int wrong = 0;
  for (std::size_t round = 1; round <= num_rounds; ++round) {
    counters.round = round;
    pool.run(
        [](void* context, std::size_t thread) {
          auto& c = *static_cast<Counters*>(context);
          c.by_thread[thread] += c.round;
        },
        &counters);
    for (std::size_t sum : counters.by_thread) wrong += sum != round * (round + 1) / 2;
    if (rests && round % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return wrong;
}

// One head, everything 1: out is 1 and lse is log(keys) + 64 / 8.
int attend_ones(AttentionPool& pool, std::size_t num_keys, std::size_t num_requests) {
  constexpr std::size_t kDim = 64, kBlock = 16;
  const std::size_t num_blocks = (num_keys + kBlock - 1) / kBlock;
  const KVTiles tiles = make_tiles(4, kBlock, kDim);
  const std::vector<float> ones(num_blocks * kBlock * kDim, 1.0f);
  std::vector<std::int64_t> ids, block_offsets{0}, row_offsets{0};
  for (std::size_t r = 0; r < num_requests; ++r) {
    for (std::size_t i = 0; i < num_blocks; ++i) ids.push_back(static_cast<std::int64_t>(i));
    block_offsets.push_back(static_cast<std::int64_t>(ids.size()));
    row_offsets.push_back(static_cast<std::int64_t>(r + 1));
  }
  const std::vector<std::int64_t> first(num_requests, 0), num(num_requests, static_cast<std::int64_t>(num_keys));
  const KeyBatch batch(ids.data(), ids.size(), block_offsets.data(), first.data(), num.data(), row_offsets.data(),
                       num_requests, kBlock);
  std::vector<float> out(num_requests * kDim), lse(num_requests);
  const std::vector<float> q(num_requests * kDim, 1.0f);
  AttendCall call{};
  call.number = call.q_number = Number::kFp32;
  call.k = call.v = reinterpret_cast<const char*>(ones.data());
  call.tiles = tiles;
  call.num_kv_heads = call.group_size = 1;
  call.num_blocks = num_blocks;
  call.q = q.data();
  call.head_dim = kDim;
  call.scale = 0.125f;
  call.out = out.data();
  call.lse = lse.data();
  pool.attend(best_isa(), call, batch);
  int wrong = 0;
  for (float x : out) wrong += std::abs(x - 1.0f) > 1e-5f;
  for (float x : lse) wrong += std::abs(x - 8.0f - std::log(static_cast<float>(num_keys))) > 1e-5f;
  return wrong;
}

// The threads share out numbers among themselves; each must be taken once, whoever comes.
int check_shared(std::size_t num_threads, std::size_t spin_us, bool rests) {
  ThreadPool pool(num_threads, spin_us);
  struct Tasks {
    std::atomic<std::size_t> next{0};
    std::size_t times_taken[64] = {};
  };
  int wrong = 0;
  for (std::size_t round = 1; round <= 300; ++round) {
    Tasks tasks;
    pool.run_shared(
        [](void* context, std::size_t) {
          auto& t = *static_cast<Tasks*>(context);
          for (std::size_t i; (i = t.next.fetch_add(1)) < 64;) ++t.times_taken[i];
        },
        &tasks);
    for (std::size_t times : tasks.times_taken) wrong += times != 1;
    if (rests && round % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (round % 3 == 0) {  // and all of them again for a round in which everyone takes part
      Counters counters{std::vector<std::size_t>(num_threads), 1};
      pool.run([](void* c, std::size_t i) { ++static_cast<Counters*>(c)->by_thread[i]; }, &counters);
      for (std::size_t sum : counters.by_thread) wrong += sum != 1;
    }
  }
  return wrong;
}

// An operating system that refuses every pin, or every second one: counted, and the threads work all the same.
int check_refused_pins() {
  const PinThread refuse = [](std::thread&, int) { return false; };
  const PinThread refuse_odd = [](std::thread& thread, int cpu) { return cpu % 2 == 0 && pin_to_cpu(thread, cpu); };
  int wrong = 0;
  for (std::size_t num_threads : {1, 2, 3, 4}) {
    wrong += ThreadPool(num_threads, 0, refuse).num_pin_failures() != num_threads - 1;
    wrong += check_rounds(num_threads, 20, 50, true, refuse);
    wrong += check_rounds(num_threads, 20, 50, true, refuse_odd);
  }
  return wrong;
}

// Callers that take turns with the same threads, in rounds of both kinds.
int check_turns(std::size_t num_threads, std::size_t spin_us) {
  ThreadPool pool(num_threads, spin_us);
  int wrong[3] = {};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 60; ++i) {
        std::lock_guard<std::mutex> lock(pool.mutex());
        if ((i + caller) % 2 == 0) {
          Counters counters{std::vector<std::size_t>(num_threads), 1};
          pool.run([](void* c, std::size_t thread) { ++static_cast<Counters*>(c)->by_thread[thread]; }, &counters);
          for (std::size_t sum : counters.by_thread) wrong[caller] += sum != 1;
        } else {
          std::atomic<int> num_left{40};
          std::atomic<int> num_done{0};
          std::atomic<int>* both[] = {&num_left, &num_done};
          pool.run_shared(
              [](void* context, std::size_t) {
                auto** counts = static_cast<std::atomic<int>**>(context);
                while (counts[0]->fetch_sub(1) > 0) counts[1]->fetch_add(1);
              },
              both);
          wrong[caller] += num_done.load() != 40;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  return wrong[0] + wrong[1] + wrong[2];
}

// Pools that end while their threads sleep, while they still spin, and just behind a round that not all have begun.
int check_ends(std::size_t num_threads) {
  int wrong = 0;
  for (int i = 0; i < 10; ++i) {
    { ThreadPool asleep(num_threads, 0); std::this_thread::sleep_for(std::chrono::milliseconds(i % 3)); }
    { ThreadPool spinning(num_threads, 100000); }
  }
  // A thread that came late to the last round took the end for a round that it knew, and slept for ever.
  for (int i = 0; i < 400; ++i) {
    std::atomic<std::size_t> num_calls{0};
    {
      ThreadPool busy(num_threads, 0);
      busy.run_shared([](void* c, std::size_t) { static_cast<std::atomic<std::size_t>*>(c)->fetch_add(1); }, &num_calls);
    }
    wrong += num_calls.load() < 1 || num_calls.load() > num_threads;
  }
  return wrong;
}

int check_callers(std::size_t num_threads) {
  ThreadPool threads(num_threads, 20);
  AttentionPool pool(threads);
  int wrong[3] = {};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(static_cast<unsigned>(caller));
      for (int i = 0; i < 30; ++i) {
        const std::size_t num_requests = 1 + random() % 3;
        wrong[caller] += attend_ones(pool, 1 + random() % 1500, num_requests);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  return wrong[0] + wrong[1] + wrong[2];
}

}  // namespace

int main() {
  int wrong = 0;
  for (std::size_t num_threads : {1, 2, 3, 5, 8}) {
    wrong += check_rounds(num_threads, 20, 300, false);
    wrong += check_rounds(num_threads, 0, 100, true);
    wrong += check_shared(num_threads, 20, false);
    wrong += check_shared(num_threads, 0, true);
    wrong += check_callers(num_threads);
    wrong += check_turns(num_threads, 20) + check_turns(num_threads, 0);
    wrong += check_ends(num_threads);
  }
  wrong += check_refused_pins();
  std::printf("pool: %d wrong\n", wrong);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
