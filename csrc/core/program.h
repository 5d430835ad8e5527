// Program: ops that were recorded once, with the memory that they read and write, and are run again in the same order:
// a step of a model without Python between its ops.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace ambidex {

class Program {
 public:
  using Op = std::function<void()>;

  Program() = default;
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // From here to `end`, ops that this thread performs are added. Throws std::invalid_argument if the thread records
  // already, or the program has been recorded.
  void begin();
  void end();

  void add(Op op) { ops_.push_back(std::move(op)); }
  std::size_t num_ops() const { return ops_.size(); }

  // Runs all ops in the calling thread (an op may use threads of a pool). What an op throws ends the run.
  void run() const;

  // What the calling thread records into, or null.
  static Program* recording();

 private:
  std::vector<Op> ops_;
};

// Runs an op, and adds it to the program that the calling thread records, if any. The op must own what it needs, but
// for memory that whoever records keeps alive.
template <class Op>
void perform(Op op) {
  op();
  if (Program* const program = Program::recording()) program->add(std::move(op));
}

}  // namespace ambidex
