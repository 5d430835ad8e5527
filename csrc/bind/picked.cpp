// ambidex._native, picked rows: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include "bind/picked.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "bind/arrays.h"
#include "ops/picked.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

using Vector = Array<const float, 1>;
using NewVector = Array<float, 1>;
using RowIds = Array<const std::int64_t, 1>;

void bind_relu_sum(PickedPool& self, const ConstBytes<2>& table, std::string_view number_name, const RowIds& in_rows,
                   const RowIds& out_rows, const std::optional<Vector>& biases, const Vector& x, const NewVector& h,
                   const NewVector& y, std::optional<std::string_view> isa) {
  const Number number = find_number(number_name);
  check_itemsize("table", table, size_of(number));
  const std::size_t num_picked = in_rows.shape(0), width = table.shape(1);
  check_size("out_rows", "the picked neurons", out_rows, 0, num_picked);
  check_size("h", "the picked neurons", h, 0, num_picked);
  if (biases) check_size("biases", "the picked neurons", *biases, 0, num_picked);
  check_size("x", "the columns of the table", x, 0, width);
  check_size("y", "the columns of the table", y, 0, width);
  const Isa chosen = choose_isa(isa);
  const PickedCall call{number,          table.data(),    table.shape(0),
                        width,           in_rows.data(),  out_rows.data(),
                        biases ? biases->data() : nullptr, num_picked, x.data(),
                        h.data(),        y.data()};
  nb::gil_scoped_release release;
  self.relu_sum(chosen, call);
}

}  // namespace

void bind_picked(nb::module_& m) {
  nb::class_<PickedPool>(m, "PickedPool")
      .def(nb::init<ThreadPool&>(), "threads"_a, nb::keep_alive<1, 2>())
      .def("relu_sum", &bind_relu_sum, "table"_a.noconvert(), "number"_a, "in_rows"_a.noconvert(),
           "out_rows"_a.noconvert(), "biases"_a.noconvert().none(), "x"_a.noconvert(), "h"_a.noconvert(),
           "y"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none());
}

}  // namespace ambidex
