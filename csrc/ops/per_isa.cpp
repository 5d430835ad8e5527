// Compiled once per instruction set, with that set's flags and AMBIDEX_ISA as the namespace (CMakeLists.txt).
// A new op adds its body here, a large one a file of its own beside this: files compile side by side.
#include "ops/attention-inl.h"
#include "ops/bounded-inl.h"
#include "ops/map-inl.h"
#include "ops/merge-inl.h"
#include "ops/picked-inl.h"
#include "ops/read-inl.h"
#include "ops/rows-inl.h"
