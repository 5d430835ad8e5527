// Scores of keys in rows as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace ambidex {

void bind_score_rows(nanobind::module_& m);

}  // namespace ambidex
