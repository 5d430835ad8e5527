#include "ops/score_thread.h"

#include <algorithm>

#include "core/check.h"
#include "core/pause.h"

#if defined(__linux__)
#include <pthread.h>
#endif

namespace ambidex {
namespace {

using Clock = std::chrono::steady_clock;

// A reading of the clock costs about as much as this many pauses.
constexpr int kPausesPerReading = 64;

// An answer that takes longer is worth the 50 us that waking a sleeper takes.
constexpr std::chrono::microseconds kSpunForAnswer{1000};

double seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

// Until `is_so`, for that long at most; on a machine with fewer cores than threads another one may need this.
template <class Condition>
bool spin(Condition is_so, std::chrono::microseconds limit) {
  const auto end = Clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerReading; ++i) {
      if (is_so()) return true;
      pause();
    }
    std::this_thread::yield();
  } while (Clock::now() < end);
  return is_so();
}

}  // namespace

ScoreThread::ScoreThread(ScorePool& pool, Isa isa, std::chrono::microseconds limit, std::chrono::microseconds spin)
    : pool_(pool), isa_(isa), limit_(limit), spin_(spin), thread_([this] { serve(); }) {}

ScoreThread::~ScoreThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_.store(true);
  }
  asked_.notify_one();
  thread_.join();
}

std::uint64_t ScoreThread::ask(Question question) {
  std::uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    questions_.push_back(std::move(question));
    number = num_asked_.load() + 1;
    num_asked_.store(number);
  }
  asked_.notify_one();
  return number;
}

ScoreThread::Answer ScoreThread::wait(std::uint64_t number) {
  AMBIDEX_CHECK(number >= 1 && number <= num_asked_.load(), "number: expected 1 to ", num_asked_.load(), ", got ", number);
  const auto is_there = [&] { return num_answered_.load() >= number; };
  spin(is_there, kSpunForAnswer);
  std::unique_lock<std::mutex> lock(mutex_);
  answered_.wait(lock, is_there);
  const auto found = std::find_if(answers_.begin(), answers_.end(), [&](const auto& one) { return one.first == number; });
  AMBIDEX_CHECK(found != answers_.end(), "number: the answer to question ", number, " has been had");
  const Answer answer = found->second;
  answers_.erase(found);
  return answer;
}

void ScoreThread::serve() {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "ambidex-scores");
#endif
  for (std::uint64_t number = 1;; ++number) {
    const auto is_asked = [&] { return num_asked_.load() >= number || is_stopping_.load(); };
    spin(is_asked, spin_);
    Question question;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      asked_.wait(lock, is_asked);
      if (questions_.empty()) return;
      question = std::move(questions_.front());
      questions_.pop_front();
    }
    const Answer given = answer(question);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      answers_.emplace_back(number, given);
      num_answered_.store(number);
    }
    answered_.notify_all();
  }
}

ScoreThread::Answer ScoreThread::answer(const Question& question) {
  const auto* const word = question.word;
  const bool is_there = word == nullptr || spin([word] { return __atomic_load_n(word, __ATOMIC_ACQUIRE) != 0; }, limit_);
  const auto begin = Clock::now();
  if (is_there) pool_.score_rows(isa_, question.form, question.calls);
  return {is_there, seconds(begin), seconds(Clock::now())};
}

}  // namespace ambidex
