// A thread that scores keys while its owner does other things: it waits for the queries without holding anything that
// others need (in Python the interpreter's lock would hold it up for milliseconds), then has the pool score.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ops/score_rows.h"

namespace ambidex {

class ScoreThread {
 public:
  struct Question {
    ScoreForm form;
    std::vector<ScoreCall> calls;
    // 0 until whoever writes the queries has done so, and 1 from then on; null: they are there.
    const std::int32_t* word;
  };
  struct Answer {
    bool is_answered;       // the queries came in time
    double begin_s, end_s;  // of the scoring, seconds of std::chrono::steady_clock
  };

  // limit: how long queries are waited for; spin: for how long the thread looks for the next question before it sleeps.
  ScoreThread(ScorePool& pool, Isa isa, std::chrono::microseconds limit, std::chrono::microseconds spin);
  // Questions that were asked are answered before.
  ~ScoreThread();
  ScoreThread(const ScoreThread&) = delete;
  ScoreThread& operator=(const ScoreThread&) = delete;

  // Asks; questions are answered in their order. Returns the number of this one: 1, 2, … What it names must outlive its
  // answer.
  std::uint64_t ask(Question question);

  // Waits for the answer to a question, which can be had once; spins for its first millisecond.
  // Throws std::invalid_argument for a number that was not given, or whose answer has been had.
  Answer wait(std::uint64_t number);

 private:
  void serve();
  Answer answer(const Question& question);

  ScorePool& pool_;
  const Isa isa_;
  const std::chrono::microseconds limit_, spin_;
  std::mutex mutex_;  // of what follows, but for reads of the two counts
  std::condition_variable asked_, answered_;
  std::deque<Question> questions_;                         // not yet answered
  std::deque<std::pair<std::uint64_t, Answer>> answers_;  // not yet had
  std::atomic<std::uint64_t> num_asked_{0}, num_answered_{0};
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;
};

}  // namespace ambidex
