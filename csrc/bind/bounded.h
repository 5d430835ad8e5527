// Bounded attention as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include "ops/bounded.h"

namespace ambidex {

// The memory of one layer that bounded attention reads and writes, checked once. Python keeps the arrays alive.
class BoundedArrays {
 public:
  explicit BoundedArrays(const BoundedCall& call) : call_(call) {}
  const BoundedCall& call() const { return call_; }

 private:
  BoundedCall call_;
};

void bind_bounded(nanobind::module_& m);

}  // namespace ambidex
