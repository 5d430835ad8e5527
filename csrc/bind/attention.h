// Attention over tiled pools as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_attention(nanobind::module_& m);

}  // namespace ambidex
