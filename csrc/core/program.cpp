#include "core/program.h"

#include "core/check.h"

namespace ambidex {
namespace {

thread_local Program* current = nullptr;

}  // namespace

Program* Program::recording() { return current; }

Program::~Program() {
  if (current == this) current = nullptr;
}

void Program::begin() {
  AMBIDEX_CHECK(current == nullptr, "program: this thread records another one");
  AMBIDEX_CHECK(ops_.empty(), "program: it has been recorded, ", ops_.size(), " ops");
  current = this;
}

void Program::end() {
  AMBIDEX_CHECK(current == this, "program: this thread does not record it");
  current = nullptr;
}

void Program::run() const {
  for (const Op& op : ops_) op();
}

}  // namespace ambidex
