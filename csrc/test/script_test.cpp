// The script of the CPU lane against an accelerator that is a thread here: words that come at once, late or never, other
// callers of the same pool meanwhile, and buffers that every layer uses again.
#include "ops/script.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace {

using namespace ambidex;

constexpr std::size_t kDim = 64, kBlock = 16, kLayers = 6, kKeys = 700;
constexpr float kScale = 0.125f;

// Keys of one head, all 1, so lse is scale * sum(q) + log(keys); values of layer l are l + 1, and so is out.
class World {
 public:
  explicit World(ThreadPool& threads)
      : pool(threads),
        ids_(num_blocks()),
        batch(make_batch()),
        ones_(num_blocks() * kBlock * kDim, 1.0f),
        asked_(kLayers * AttentionScript::kWordStride),
        answered_(asked_.size()),
        streamed_(asked_.size()),
        script(pool, best_isa(), asked_.data(), answered_.data(), streamed_.data(), kLayers) {
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      values_.emplace_back(ones_.size(), static_cast<float>(layer + 1));
    }
    for (std::size_t layer = 0; layer < kLayers; ++layer) script.add_layer(call_of(layer));
  }

  // The accelerator's side of one step: only the first `num_asked` layers are asked for. Returns wrong answers.
  int ask(std::mt19937& random, std::size_t num_asked, bool is_late) {
    int wrong = 0;
    for (std::size_t layer = 0; layer < num_asked; ++layer) {
      if (is_late) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
      const float x = static_cast<float>(random() % 100) / 50.0f - 1.0f;
      q_.assign(kDim, x);
      set(asked_, layer);
      if (random() % 2 != 0) set(streamed_, layer);
      while (__atomic_load_n(&answered_[layer * AttentionScript::kWordStride], __ATOMIC_ACQUIRE) == 0) {
        std::this_thread::yield();
      }
      const float lse = kScale * x * static_cast<float>(kDim) + std::log(static_cast<float>(kKeys));
      wrong += std::abs(lse_[0] - lse) > 1e-3f;
      for (float value : out_) wrong += std::abs(value - static_cast<float>(layer + 1)) > 1e-4f;
    }
    return wrong;
  }

  void reset() {
    for (auto* words : {&asked_, &answered_, &streamed_}) words->assign(words->size(), 0);
  }

  // Somebody else's call, with buffers of its own.
  int attend_beside() {
    std::vector<float> q(kDim, 0.5f), out(kDim), lse(1);
    AttendCall call = call_of(2);
    call.q = q.data();
    call.out = out.data();
    call.lse = lse.data();
    pool.attend(best_isa(), call, batch);
    return std::abs(out[kDim - 1] - 3.0f) > 1e-4f;
  }

  AttentionPool pool;

 private:
  static std::size_t num_blocks() { return (kKeys + kBlock - 1) / kBlock; }

  static void set(std::vector<std::int32_t>& words, std::size_t layer) {
    __atomic_store_n(&words[layer * AttentionScript::kWordStride], 1, __ATOMIC_RELEASE);
  }

  KeyBatch make_batch() {
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int64_t>(i);
    const std::int64_t blocks[] = {0, static_cast<std::int64_t>(ids_.size())}, rows[] = {0, 1};
    const std::int64_t first = 0, num = kKeys;
    return KeyBatch(ids_.data(), ids_.size(), blocks, &first, &num, rows, 1, kBlock);
  }

  AttendCall call_of(std::size_t layer) {
    AttendCall call{};
    call.number = call.q_number = Number::kFp32;
    call.k = reinterpret_cast<const char*>(ones_.data());
    call.v = reinterpret_cast<const char*>(values_[layer].data());
    call.tiles = make_tiles(4, kBlock, kDim);
    call.num_kv_heads = call.group_size = call.num_rows = 1;
    call.num_blocks = num_blocks();
    q_.resize(kDim);
    out_.resize(kDim);
    lse_.resize(1);
    call.q = q_.data();
    call.head_dim = kDim;
    call.scale = kScale;
    call.out = out_.data();
    call.lse = lse_.data();
    return call;
  }

  std::vector<std::int64_t> ids_;

 public:
  KeyBatch batch;

 private:
  std::vector<float> ones_;
  std::vector<std::vector<float>> values_;
  std::vector<float> q_, out_, lse_;
  std::vector<std::int32_t> asked_, answered_, streamed_;

 public:
  AttentionScript script;
};

int check_steps(std::size_t num_threads, bool is_late) {
  ThreadPool threads(num_threads, is_late ? 0 : 50);
  World world(threads);
  std::mt19937 random(static_cast<unsigned>(num_threads));
  int wrong = 0;
  for (int step = 0; step < 12; ++step) {
    world.reset();
    AttentionScript::Outcome outcome{};
    int wrong_beside = 0;
    std::thread lane([&] {
      outcome = world.script.run(std::vector<const KeyBatch*>(kLayers, &world.batch), {}, std::chrono::seconds(20));
    });
    std::thread other([&] {
      for (int i = 0; i < 5; ++i) wrong_beside += world.attend_beside();
    });
    wrong += world.ask(random, kLayers, is_late);
    lane.join();
    other.join();
    wrong += wrong_beside + (outcome.num_answered != kLayers) + (outcome.num_last > kLayers);
  }
  return wrong;
}

// An accelerator that stops asking: the lane gives up after its limit, and the next step is answered.
int check_lost(std::size_t num_threads) {
  ThreadPool threads(num_threads, 0);
  World world(threads);
  std::mt19937 random(7);
  int wrong = 0;
  for (std::size_t num_asked : {std::size_t{0}, std::size_t{3}, kLayers}) {
    world.reset();
    AttentionScript::Outcome outcome{};
    std::thread lane([&] {
      outcome = world.script.run(std::vector<const KeyBatch*>(kLayers, &world.batch), {}, std::chrono::milliseconds(200));
    });
    wrong += world.ask(random, num_asked, false);
    lane.join();
    wrong += outcome.num_answered != num_asked;
  }
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  for (std::size_t num_threads : {1, 2, 4}) {
    wrong += check_steps(num_threads, false) + check_steps(num_threads, true) + check_lost(num_threads);
  }
  std::printf("script: %d wrong\n", wrong);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
