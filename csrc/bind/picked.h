// The bindings of picked rows; see picked.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_picked(nanobind::module_& m);

}  // namespace ambidex
