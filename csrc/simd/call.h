// AMBIDEX_CALL(isa, function, arguments...): calls the form of `function` that was compiled for `isa`, and returns what
// it returns. The forms are declared in namespaces generic, avx2, avx512, avx512bf16 and amx of ambidex.
#pragma once

#include "simd/isa.h"

#if defined(__x86_64__)
#define AMBIDEX_CALL(isa, function, ...)            \
  switch (isa) {                                    \
    case Isa::kAmx:                                 \
      return amx::function(__VA_ARGS__);            \
    case Isa::kAvx512Bf16:                          \
      return avx512bf16::function(__VA_ARGS__);     \
    case Isa::kAvx512:                              \
      return avx512::function(__VA_ARGS__);         \
    case Isa::kAvx2:                                \
      return avx2::function(__VA_ARGS__);           \
    default:                                        \
      return generic::function(__VA_ARGS__);        \
  }
#else
#define AMBIDEX_CALL(isa, function, ...) return generic::function(__VA_ARGS__)
#endif
