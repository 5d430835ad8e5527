// Matrix products as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_linear(nanobind::module_& m);

}  // namespace ambidex
