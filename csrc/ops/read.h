// read_all: what memory gives to all threads, the measure of every other op.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/pool.h"
#include "simd/isa.h"

namespace ambidex {

// Reads all bytes with all threads and returns their sum.
std::uint64_t read_all(Isa isa, ThreadPool& threads, const char* bytes, std::size_t num_bytes);

}  // namespace ambidex
