// What a run of stored numbers is.
#pragma once

#include <cstddef>

namespace ambidex {

enum class Number { kFp32, kBf16, kFp16, kInt8 };

constexpr std::size_t size_of(Number number) { return number == Number::kFp32 ? 4 : number == Number::kInt8 ? 1 : 2; }

}  // namespace ambidex
