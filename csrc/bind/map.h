// The ops number by number as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_map(nanobind::module_& m);

}  // namespace ambidex
