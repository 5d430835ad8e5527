#include "simd/isa.h"

#include <iterator>
#include <string>

#include "core/check.h"

namespace ambidex {
namespace {

constexpr Isa kAll[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512};

// NOTE: asks for exactly the extensions that CMakeLists.txt compiles that set with.
bool runs_here(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kGeneric:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return runs_here(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
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
  }
  return "";
}

Isa find_isa(std::string_view name) {
  for (Isa isa : kAll) {
    if (name_of(isa) != name) continue;
    AMBIDEX_CHECK(runs_here(isa), "isa: this machine does not run \"", name, "\"; it runs ", list_available());
    return isa;
  }
  throw_check("name_of(isa) == name", __FILE__, __LINE__, "isa: unknown \"", name, "\"; this machine runs ",
              list_available());
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : kAll) {
    if (runs_here(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa best_isa() {
  for (auto isa = std::rbegin(kAll); isa != std::rend(kAll); ++isa) {
    if (runs_here(*isa)) return *isa;
  }
  return Isa::kGeneric;
}

}  // namespace ambidex
