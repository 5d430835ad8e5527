// The ops over rows as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_rows(nanobind::module_& m);

}  // namespace ambidex
