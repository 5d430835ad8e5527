// ambidex._native, matrix products: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include "bind/linear.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "core/program.h"
#include "ops/linear.h"
#include "ops/quant.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

using Vector = Array<const float, 1>;
using Rows = Array<const float, 2>;
using NewRows = Array<float, 2>;

// Matrices, and the arrays whose memory they name.
struct BoundMatrices {
  Matrices matrices;
  std::vector<ConstBytes<2>> weights;
  std::vector<std::optional<Vector>> biases;
};

void make_matrices(BoundMatrices* self, std::vector<ConstBytes<2>> weights, std::string_view number_name,
                   std::vector<std::optional<Vector>> biases) {
  const Number number = find_number(number_name);
  AMBIDEX_CHECK(number != Number::kInt8, "weights: expected fp32, bf16 or fp16, got int8");
  AMBIDEX_CHECK(!weights.empty() && weights.size() == biases.size(), "biases: expected one or None for each of ",
                weights.size(), " weights (at least 1), got ", biases.size());
  Matrices matrices{number, weights[0].shape(1), {}};
  for (std::size_t i = 0; i < weights.size(); ++i) {
    check_itemsize("weights", weights[i], size_of(number));
    check_size("weights", "the numbers of x", weights[i], 1, matrices.num_in);
    if (biases[i]) check_size("biases", "the rows of its weight", *biases[i], 0, weights[i].shape(0));
    matrices.parts.push_back({weights[i].data(), biases[i] ? biases[i]->data() : nullptr, weights[i].shape(0)});
  }
  new (self) BoundMatrices{std::move(matrices), std::move(weights), std::move(biases)};
}

// Packed weights: the rows of each are said, since the last group may be filled up.
BoundMatrices make_quantized(std::vector<ConstBytes<2>> weights, std::string_view type,
                             const std::vector<std::size_t>& num_out, std::vector<std::optional<Vector>> biases) {
  const Number number = find_quantized(type);
  AMBIDEX_CHECK(!weights.empty() && weights.size() == biases.size() && weights.size() == num_out.size(),
                "biases, num_out: expected one for each of ", weights.size(), " weights (at least 1), got ",
                biases.size(), " and ", num_out.size());
  const std::size_t group_bytes = kGroupRows * block_of(number).bytes;
  Matrices matrices{number, weights[0].shape(1) / group_bytes * block_of(number).numbers, {}};
  for (std::size_t i = 0; i < weights.size(); ++i) {
    check_itemsize("weights", weights[i], 1);
    check_size("weights", "the bytes of a group", weights[i], 1, kGroupRows * row_bytes(number, matrices.num_in));
    check_size("weights", "the groups of its rows", weights[i], 0, (num_out[i] + kGroupRows - 1) / kGroupRows);
    if (biases[i]) check_size("biases", "the rows of its weight", *biases[i], 0, num_out[i]);
    matrices.parts.push_back({weights[i].data(), biases[i] ? biases[i]->data() : nullptr, num_out[i]});
  }
  return {std::move(matrices), std::move(weights), std::move(biases)};
}

void bind_multiply(LinearPool& self, const BoundMatrices& bound, const Rows& x, const std::vector<NewRows>& ys,
                   const std::optional<Rows>& residual, std::optional<std::string_view> isa) {
  const Matrices& matrices = bound.matrices;
  const std::size_t num_parts = matrices.parts.size();
  check_size("x", "the columns of the weights", x, 1, matrices.num_in);
  AMBIDEX_CHECK(ys.size() == num_parts, "ys: expected one for each of ", num_parts, " weights, got ", ys.size());
  AMBIDEX_CHECK(!residual || num_parts == 1, "residual: goes with one weight, got ", num_parts);
  std::vector<Product> products(num_parts);
  for (std::size_t i = 0; i < num_parts; ++i) {
    check_size("ys", "the rows of x", ys[i], 0, x.shape(0));
    check_size("ys", "the rows of its weight", ys[i], 1, matrices.parts[i].num_out);
    products[i] = {ys[i].data(), nullptr};
  }
  if (residual) {
    check_size("residual", "the rows of x", *residual, 0, x.shape(0));
    check_size("residual", "the rows of the weight", *residual, 1, matrices.parts[0].num_out);
    products[0].residual = residual->data();
  }
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([&self, chosen, &matrices, x = x.data(), num_tokens = x.shape(0), products = std::move(products)] {
    self.multiply(chosen, matrices, x, num_tokens, products.data());
  });
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<BoundMatrices>(m, "Matrices")
      .def("__init__", &make_matrices, "weights"_a.noconvert(), "number"_a, "biases"_a.noconvert())
      .def_static("quantized", &make_quantized, "weights"_a.noconvert(), "type"_a, "num_out"_a, "biases"_a.noconvert());
  nb::class_<LinearPool>(m, "LinearPool")
      .def(nb::init<ThreadPool&, bool>(), "threads"_a, nb::kw_only(), "tiles_quantized"_a = false,
           nb::keep_alive<1, 2>())
      .def("multiply", &bind_multiply, "matrices"_a, "x"_a.noconvert(), "ys"_a.noconvert(),
           "residual"_a.noconvert().none(), nb::kw_only(), "isa"_a = nb::none());
}

}  // namespace ambidex
