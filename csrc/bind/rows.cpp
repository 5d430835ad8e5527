// ambidex._native, ops over rows: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include "bind/rows.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include "bind/arrays.h"
#include "core/program.h"
#include "ops/rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

template <class A, class B>
void check_same_shape(const char* name, const A& array, const B& like) {
  AMBIDEX_CHECK(array.ndim() == like.ndim(), name, ": expected ", like.ndim(), " axes, got ", array.ndim());
  for (std::size_t axis = 0; axis < like.ndim(); ++axis) check_size(name, "an axis of x", array, axis, like.shape(axis));
}

using ConstFloats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

void bind_rms_norm(const ConstFloats& x, const Array<const float, 1>& weight, float eps, const Floats& y,
                   std::optional<std::string_view> isa) {
  AMBIDEX_CHECK(x.ndim() >= 1, "x: expected at least 1 axis, got 0");
  const std::size_t width = x.shape(x.ndim() - 1);
  check_size("weight", "the last axis of x", weight, 0, width);
  check_same_shape("y", y, x);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, x = x.data(), weight = weight.data(), eps, num_rows = width == 0 ? 0 : x.size() / width, width,
           y = y.data()] { rms_norm(chosen, x, weight, eps, num_rows, width, y); });
}

void bind_layer_norm(const ConstFloats& x, const Array<const float, 1>& weight,
                     const std::optional<Array<const float, 1>>& bias, float eps, const Floats& y,
                     std::optional<std::string_view> isa) {
  AMBIDEX_CHECK(x.ndim() >= 1, "x: expected at least 1 axis, got 0");
  const std::size_t width = x.shape(x.ndim() - 1);
  check_size("weight", "the last axis of x", weight, 0, width);
  if (bias) check_size("bias", "the last axis of x", *bias, 0, width);
  check_same_shape("y", y, x);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, x = x.data(), weight = weight.data(), bias = bias ? bias->data() : nullptr, eps,
           num_rows = width == 0 ? 0 : x.size() / width, width,
           y = y.data()] { layer_norm(chosen, x, weight, bias, eps, num_rows, width, y); });
}

void bind_likeliest(const Array<const float, 2>& x, const Array<std::int64_t, 1>& places,
                    std::optional<std::string_view> isa) {
  check_size("places", "the rows of x", places, 0, x.shape(0));
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, x = x.data(), num_rows = x.shape(0), width = x.shape(1), places = places.data()] {
    likeliest(chosen, x, num_rows, width, places);
  });
}

void bind_silu_mul(const ConstFloats& gate, const ConstFloats& up, const Floats& y,
                   std::optional<std::string_view> isa) {
  check_same_shape("up", up, gate);
  check_same_shape("y", y, gate);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, gate = gate.data(), up = up.data(), num = gate.size(), y = y.data()] {
    silu_mul(chosen, gate, up, num, y);
  });
}

void bind_rotate(const Array<const float, 3>& x, const Array<const float, 2>& cos, const Array<const float, 2>& sin,
                 const Array<float, 3>& y, std::optional<std::string_view> isa) {
  check_size("cos", "the tokens of x", cos, 0, x.shape(0));
  check_same_shape("sin", sin, cos);
  check_same_shape("y", y, x);
  AMBIDEX_CHECK(2 * cos.shape(1) <= x.shape(2), "cos: ", cos.shape(1), " angles turn ", 2 * cos.shape(1),
                " numbers, but a head has ", x.shape(2));
  const Rotation rotation{cos.data(), sin.data(), cos.shape(1), x.shape(0), x.shape(1), x.shape(2)};
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, rotation, x = x.data(), y = y.data()] { rotate(chosen, rotation, x, y); });
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("rms_norm", &bind_rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "y"_a.noconvert(),
        nb::kw_only(), "isa"_a = nb::none());
  m.def("layer_norm", &bind_layer_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "bias"_a.noconvert().none(), "eps"_a,
        "y"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none());
  m.def("likeliest", &bind_likeliest, "x"_a.noconvert(), "places"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none());
  m.def("silu_mul", &bind_silu_mul, "gate"_a.noconvert(), "up"_a.noconvert(), "y"_a.noconvert(), nb::kw_only(),
        "isa"_a = nb::none());
  m.def("rotate", &bind_rotate, "x"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert(), "y"_a.noconvert(),
        nb::kw_only(), "isa"_a = nb::none());
}

}  // namespace ambidex
