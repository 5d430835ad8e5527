// Compiled once per instruction set, as per_isa.cpp is.
#include "ops/score_rows-inl.h"
