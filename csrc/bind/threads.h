// The thread pool as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_threads(nanobind::module_& m);

}  // namespace ambidex
