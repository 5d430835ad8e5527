// As per_isa.cpp: compiled once per instruction set.
#include "ops/linear-inl.h"
#include "ops/linear_tiles-inl.h"
#include "ops/quant_tiles-inl.h"
