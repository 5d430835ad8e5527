// Quantised matrices as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_quant(nanobind::module_& m);

}  // namespace ambidex
