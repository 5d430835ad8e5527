// ambidex._native: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bind/arrays.h"
#include "bind/attention.h"
#include "bind/bounded.h"
#include "bind/linear.h"
#include "bind/map.h"
#include "bind/picked.h"
#include "bind/program.h"
#include "bind/quant.h"
#include "bind/rows.h"
#include "bind/score_rows.h"
#include "bind/threads.h"
#include "core/check.h"
#include "core/program.h"
#include "ops/merge.h"
#include "simd/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

using ConstMatrix = Array<const float, 2>;
using ConstRow = Array<const float, 1>;
using Matrix = Array<float, 2>;
using Row = Array<float, 1>;

template <class M>
void check_matrix(const char* name, const M& m, std::size_t rows, std::size_t dim) {
  AMBIDEX_CHECK(m.shape(0) == rows && m.shape(1) == dim, name, ": expected shape (", rows, ", ", dim,
                ") like out_a, got (", m.shape(0), ", ", m.shape(1), ")");
}

template <class R>
void check_row(const char* name, const R& r, std::size_t rows) {
  AMBIDEX_CHECK(r.shape(0) == rows, name, ": expected shape (", rows, ",) for the rows of out_a, got (", r.shape(0),
                ",)");
}

// The same memory or none in common: in between, rows would be overwritten before they are read.
template <class In, class Out>
void check_overlap(const char* in_name, const In& in, const char* out_name, const Out& out) {
  const auto in_begin = reinterpret_cast<std::uintptr_t>(in.data());
  const auto out_begin = reinterpret_cast<std::uintptr_t>(out.data());
  const bool same = in_begin == out_begin && in.nbytes() == out.nbytes();
  const bool apart = in_begin + in.nbytes() <= out_begin || out_begin + out.nbytes() <= in_begin;
  AMBIDEX_CHECK(same || apart, out_name, ": overlaps ", in_name, " in part; pass the same array or another one");
}

void bind_merge_states(const ConstMatrix& out_a, const ConstRow& lse_a, const ConstMatrix& out_b, const ConstRow& lse_b,
                       const Matrix& out, const Row& lse, std::optional<std::string_view> isa) {
  const std::size_t rows = out_a.shape(0);
  const std::size_t dim = out_a.shape(1);
  check_row("lse_a", lse_a, rows);
  check_matrix("out_b", out_b, rows, dim);
  check_row("lse_b", lse_b, rows);
  check_matrix("out", out, rows, dim);
  check_row("lse", lse, rows);
  check_overlap("out_a", out_a, "out", out);
  check_overlap("out_b", out_b, "out", out);
  check_overlap("lse_a", lse_a, "lse", lse);
  check_overlap("lse_b", lse_b, "lse", lse);
  const Isa chosen = choose_isa(isa);
  const ConstState a{out_a.data(), lse_a.data()};
  const ConstState b{out_b.data(), lse_b.data()};
  const State merged{out.data(), lse.data()};
  nb::gil_scoped_release release;
  perform([chosen, a, b, merged, rows, dim] { merge_states(chosen, a, b, merged, rows, dim); });
}

std::vector<std::string> bind_available_isas() {
  std::vector<std::string> names;
  for (Isa isa : available_isas()) names.emplace_back(name_of(isa));
  return names;
}

}  // namespace
}  // namespace ambidex

// The signatures and docstrings that readers and type checkers see are in src/ambidex/_native.pyi.
NB_MODULE(_native, m) {
  // Threads and pools that an engine still holds when the interpreter ends are no leak that a user could mend.
  nb::set_leak_warnings(false);
  m.doc() = "Native CPU ops of Ambidex; ambidex.kernels.cpu.native is the door to it.";
  m.def("isa", [] { return std::string(ambidex::name_of(ambidex::best_isa())); });
  m.def("available_isas", &ambidex::bind_available_isas);
  // noconvert: an argument of another type is refused, never copied.
  m.def("merge_states", &ambidex::bind_merge_states, "out_a"_a.noconvert(), "lse_a"_a.noconvert(),
        "out_b"_a.noconvert(), "lse_b"_a.noconvert(), "out"_a.noconvert(), "lse"_a.noconvert(), nb::kw_only(),
        "isa"_a = nb::none());
  ambidex::bind_threads(m);
  ambidex::bind_bounded(m);
  ambidex::bind_attention(m);
  ambidex::bind_linear(m);
  ambidex::bind_map(m);
  ambidex::bind_picked(m);
  ambidex::bind_program(m);
  ambidex::bind_quant(m);
  ambidex::bind_rows(m);
  ambidex::bind_score_rows(m);
}
