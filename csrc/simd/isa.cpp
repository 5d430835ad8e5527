#include "simd/isa.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/check.h"

namespace ambidex {
namespace {

constexpr Isa kAll[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};

#if defined(__x86_64__)

// Not every compiler's __builtin_cpu_supports knows these names.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1u) != 0;
}

// amx-tile, amx-bf16, amx-int8
bool has_amx() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 24 & 1u) != 0 && (d >> 22 & 1u) != 0 &&
         (d >> 25 & 1u) != 0;
}

// Linux gives a process the 8 KiB of tile registers only when asked; threads inherit the permission.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
#else
  return false;
#endif
}

#endif

// NOTE: asks for exactly the extensions that CMakeLists.txt compiles that set with. Asked once: cpuid leaves a virtual
// machine, and the whole question took 45 us in one.
bool runs_here(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kGeneric:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case Isa::kAvx512:
      return runs_here(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16:
      return runs_here(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    case Isa::kAmx:
      return runs_here(Isa::kAvx512Bf16) && has_amx() && may_use_tiles();
  }
  return false;
#else
  return isa == Isa::kGeneric;
#endif
}

std::string list_available() {
  std::string names;
  for (Isa isa : available_isas()) names.append(names.empty() ? "" : ", ").append(name_of(isa));
  return names;
}

}  // namespace

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::kGeneric:
      return "generic";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
    case Isa::kAmx:
      return "amx";
  }
  return "";
}

Isa find_isa(std::string_view name) {
  for (Isa isa : kAll) {
    if (name_of(isa) != name) continue;
    const std::vector<Isa>& isas = available_isas();
    AMBIDEX_CHECK(std::find(isas.begin(), isas.end(), isa) != isas.end(), "isa: this machine does not run \"", name, "\"; it runs ", list_available());
    return isa;
  }
  throw_check("name_of(isa) == name", __FILE__, __LINE__, "isa: unknown \"", name, "\"; this machine runs ",
              list_available());
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> found;
    for (Isa isa : kAll) {
      if (runs_here(isa)) found.push_back(isa);
    }
    return found;
  }();
  return isas;
}

Isa best_isa() {
  static const Isa best = [] {
    const std::vector<Isa>& isas = available_isas();
    const char* name = std::getenv("AMBIDEX_MAX_ISA");
    if (name == nullptr || *name == '\0') return isas.back();
    const auto limit = std::find_if(std::begin(kAll), std::end(kAll), [&](Isa isa) { return name_of(isa) == name; });
    AMBIDEX_CHECK(limit != std::end(kAll), "AMBIDEX_MAX_ISA: expected generic, avx2, avx512, avx512bf16 or amx, got \"",
                  name, "\"");
    return *std::find_if(isas.rbegin(), isas.rend(), [&](Isa isa) { return isa <= *limit; });  // generic always is
  }();
  return best;
}

}  // namespace ambidex
