// The instruction sets that every op is compiled for, and which of them this machine runs.
#pragma once

#include <string_view>
#include <vector>

namespace ambidex {

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx };  // slowest first

std::string_view name_of(Isa isa);

// Throws std::invalid_argument for an unknown name and for a set that this machine does not run.
Isa find_isa(std::string_view name);

// Those that the processor has and the operating system saves, slowest first; never empty.
const std::vector<Isa>& available_isas();

// The fastest of them, or of those up to the one that the environment variable AMBIDEX_MAX_ISA names; a load, once it
// has been asked for.
// Throws std::invalid_argument if the variable names none.
Isa best_isa();

}  // namespace ambidex
