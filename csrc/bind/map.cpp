// ambidex._native, ops number by number: arrays with any strides in, checks, GIL released around each op.
#include "bind/map.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include "bind/arrays.h"
#include "core/program.h"
#include "ops/map.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

using AnyStrides = nb::ndarray<nb::ro, nb::device::cpu>;
using AnyStridesOut = nb::ndarray<nb::device::cpu>;
using Contiguous = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

// The axes of an array, preceded by axes of one. An axis of size 1 of the array is repeated.
template <class A>
MapInput describe(const char* name, const A& x, const MapShape& shape, std::size_t num_dims) {
  AMBIDEX_CHECK(x.ndim() <= num_dims, name, ": expected at most ", num_dims, " axes, got ", x.ndim());
  MapInput input{x.data(), {}};
  for (std::size_t axis = 0; axis < x.ndim(); ++axis) {
    const std::size_t at = kMapDims - x.ndim() + axis;
    AMBIDEX_CHECK(x.shape(axis) == shape.sizes[at] || x.shape(axis) == 1, name, ": expected ", shape.sizes[at],
                  " or 1 for axis ", axis, ", got ", x.shape(axis));
    input.strides[at] = x.shape(axis) == 1 ? 0 : x.stride(axis);
  }
  return input;
}

template <class A>
MapShape shape_of(const A& y) {
  AMBIDEX_CHECK(y.ndim() <= kMapDims, "y: expected at most ", kMapDims, " axes, got ", y.ndim());
  MapShape shape{};
  for (std::size_t axis = 0; axis < kMapDims; ++axis) {
    shape.sizes[axis] = axis + y.ndim() < kMapDims ? 1 : y.shape(axis + y.ndim() - kMapDims);
  }
  return shape;
}

// Lines as long as can be: axes that lie side by side in all arrays become one.
template <std::size_t kNum>
void join_axes(MapShape& shape, MapInput* const (&inputs)[kNum], std::ptrdiff_t* y_strides) {
  for (std::size_t axis = kMapDims - 1; axis > 0; --axis) {
    const auto inner = static_cast<std::ptrdiff_t>(shape.sizes[kMapDims - 1]);
    const std::size_t outer = kMapDims - 2;
    bool can = y_strides == nullptr || shape.sizes[outer] == 1 ||
               y_strides[outer] == inner * y_strides[kMapDims - 1];
    for (MapInput* input : inputs) {
      can = can && (shape.sizes[outer] == 1 || input->strides[outer] == inner * input->strides[kMapDims - 1]);
    }
    if (!can) return;
    shape.sizes[kMapDims - 1] *= shape.sizes[outer];
    for (std::size_t at = outer; at > 0; --at) {
      shape.sizes[at] = shape.sizes[at - 1];
      for (MapInput* input : inputs) input->strides[at] = input->strides[at - 1];
      if (y_strides != nullptr) y_strides[at] = y_strides[at - 1];
    }
    shape.sizes[0] = 1;
    for (MapInput* input : inputs) input->strides[0] = 0;
    if (y_strides != nullptr) y_strides[0] = 0;
  }
}

Element find_element(std::string_view name) {
  if (name == "fp32") return Element::kFp32;
  if (name == "bf16") return Element::kBf16;
  if (name == "fp16") return Element::kFp16;
  AMBIDEX_CHECK(name == "int64", "element: expected fp32, bf16, fp16 or int64, got \"", name, "\"");
  return Element::kInt64;
}

Unary find_unary(std::string_view name) {
  if (name == "copy") return Unary::kCopy;
  if (name == "cos") return Unary::kCos;
  if (name == "sin") return Unary::kSin;
  if (name == "relu") return Unary::kRelu;
  if (name == "gelu") return Unary::kGelu;
  AMBIDEX_CHECK(name == "silu", "op: expected copy, cos, sin, relu, gelu or silu, got \"", name, "\"");
  return Unary::kSilu;
}

Binary find_binary(std::string_view name) {
  if (name == "add") return Binary::kAdd;
  AMBIDEX_CHECK(name == "multiply", "op: expected add or multiply, got \"", name, "\"");
  return Binary::kMultiply;
}

std::size_t size_of(Element element) {
  return element == Element::kFp32 ? 4 : element == Element::kInt64 ? 8 : 2;
}

void bind_unary(std::string_view op_name, const AnyStrides& x, std::string_view element_name, const Contiguous& y,
                std::optional<std::string_view> isa) {
  const Unary op = find_unary(op_name);
  const Element element = find_element(element_name);
  check_itemsize("x", x, size_of(element));
  MapShape shape = shape_of(y);
  MapInput input = describe("x", x, shape, y.ndim());
  join_axes(shape, {&input}, nullptr);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, op, shape, element, input, y = y.data()] { map_to_fp32(chosen, op, shape, element, input, y); });
}

void bind_binary(std::string_view op_name, const nb::ndarray<const float, nb::device::cpu>& a,
                 const nb::ndarray<const float, nb::device::cpu>& b, const Contiguous& y,
                 std::optional<std::string_view> isa) {
  const Binary op = find_binary(op_name);
  MapShape shape = shape_of(y);
  MapInput first = describe("a", a, shape, y.ndim()), second = describe("b", b, shape, y.ndim());
  join_axes(shape, {&first, &second}, nullptr);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, op, shape, first, second, y = y.data()] { map_fp32(chosen, op, shape, first, second, y); });
}

void bind_scalar(std::string_view op_name, const nb::ndarray<const float, nb::device::cpu>& x, float number,
                 const Contiguous& y, std::optional<std::string_view> isa) {
  const Binary op = find_binary(op_name);
  MapShape shape = shape_of(y);
  MapInput input = describe("x", x, shape, y.ndim());
  join_axes(shape, {&input}, nullptr);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, op, shape, input, number, y = y.data()] {
    map_fp32(chosen, op, shape, input, MapInput{&number, {}}, y);
  });
}

void bind_copy(const AnyStrides& x, const AnyStridesOut& y) {
  check_itemsize("y", y, x.itemsize());
  MapShape shape = shape_of(y);
  MapInput input = describe("x", x, shape, y.ndim());
  MapInput output = describe("y", y, shape, y.ndim());
  join_axes(shape, {&input}, output.strides);
  nb::gil_scoped_release release;
  perform([shape, size = x.itemsize(), input, y = y.data(), output] {
    copy_elements(shape, size, input, y, output.strides);
  });
}

void bind_add_int64(const nb::ndarray<const std::int64_t, nb::c_contig, nb::device::cpu>& x, std::int64_t term,
                    const nb::ndarray<std::int64_t, nb::c_contig, nb::device::cpu>& y) {
  AMBIDEX_CHECK(x.size() == y.size(), "y: expected ", x.size(), " numbers as x has, got ", y.size());
  nb::gil_scoped_release release;
  perform([x = x.data(), term, num = x.size(), y = y.data()] { add_int64(x, term, num, y); });
}

void bind_gather(const ConstBytes<2>& table, const Array<const std::int64_t, 1>& ids, const Bytes<2>& y) {
  check_itemsize("y", y, table.itemsize());
  check_size("y", "the ids", y, 0, ids.shape(0));
  check_size("y", "the columns of the table", y, 1, table.shape(1));
  nb::gil_scoped_release release;
  perform([table = static_cast<const char*>(table.data()), num_rows = table.shape(0),
           row_bytes = table.shape(1) * table.itemsize(), ids = ids.data(), num_ids = ids.shape(0),
           y = static_cast<char*>(y.data())] { gather_table_rows(table, num_rows, row_bytes, ids, num_ids, y); });
}

}  // namespace

void bind_map(nb::module_& m) {
  m.def("unary", &bind_unary, "op"_a, "x"_a.noconvert(), "element"_a, "y"_a.noconvert(), nb::kw_only(),
        "isa"_a = nb::none());
  m.def("binary", &bind_binary, "op"_a, "a"_a.noconvert(), "b"_a.noconvert(), "y"_a.noconvert(), nb::kw_only(),
        "isa"_a = nb::none());
  m.def("scalar", &bind_scalar, "op"_a, "x"_a.noconvert(), "number"_a, "y"_a.noconvert(), nb::kw_only(),
        "isa"_a = nb::none());
  m.def("copy", &bind_copy, "x"_a.noconvert(), "y"_a.noconvert());
  m.def("add_int64", &bind_add_int64, "x"_a.noconvert(), "term"_a, "y"_a.noconvert());
  m.def("gather", &bind_gather, "table"_a.noconvert(), "ids"_a.noconvert(), "y"_a.noconvert());
}

}  // namespace ambidex
