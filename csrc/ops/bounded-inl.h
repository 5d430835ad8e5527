// The ops of bounded attention, compiled once per instruction set (per_isa.cpp).
#pragma once

#include "ops/bounded_keep-inl.h"
#include "ops/bounded_scan-inl.h"

namespace ambidex::AMBIDEX_ISA {

void scan_range(const BoundedCall& call, const ScanRange& range, char* workspace) {
  with_form(Number::kInt8, range.keys.num_rows * call.scan.group_size, [&](auto form) {
    if constexpr (decltype(form)::kHasScales) Scanner<decltype(form)>(call, range, workspace).run();
  });
}

void keep_range(const BoundedCall& call, const KeepRange& range, char* workspace) {
  switch (call.v_number) {
    case Number::kFp32:
      return Keeper<float>(call, range, workspace).run();
    case Number::kBf16:
      return Keeper<Bf16>(call, range, workspace).run();
    case Number::kFp16:
      return Keeper<Fp16>(call, range, workspace).run();
    default:
      return Keeper<int8_t>(call, range, workspace).run();
  }
}

std::size_t bounded_workspace_bytes(const BoundedCall& call, std::size_t rows) {
  std::size_t bytes = KeepSpace(nullptr, call, rows).bytes;
  with_form(Number::kInt8, rows, [&](auto form) {
    if constexpr (decltype(form)::kHasScales) {
      const std::size_t other = ScanSpace<decltype(form)>(nullptr, call, rows).bytes;
      bytes = other > bytes ? other : bytes;
    }
  });
  return bytes;
}

}  // namespace ambidex::AMBIDEX_ISA
