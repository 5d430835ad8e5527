// ambidex._native, quantised matrices: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include "bind/quant.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>

#include "bind/arrays.h"
#include "core/program.h"
#include "ops/quant.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

// The numbers of a row; whether `packed` [groups, bytes of a group] is a matrix of whole blocks.
template <class A>
std::size_t num_in_of(Number number, const A& packed) {
  const Block block = block_of(number);
  const std::size_t group_bytes = kGroupRows * block.bytes;
  check_itemsize("packed", packed, 1);
  AMBIDEX_CHECK(packed.shape(1) % group_bytes == 0, "packed: expected groups of a multiple of ", group_bytes,
                " bytes, got ", packed.shape(1));
  return packed.shape(1) / group_bytes * block.numbers;
}

void bind_pack_rows(const Array<std::uint8_t, 2>& packed, std::string_view type,
                    const Array<const std::uint8_t, 2>& rows, std::size_t first_row) {
  const Number number = find_quantized(type);
  const std::size_t num_in = num_in_of(number, packed), num_rows = rows.shape(0);
  check_size("rows", "the bytes of a row", rows, 1, row_bytes(number, num_in));
  const std::size_t room = packed.shape(0) * kGroupRows;
  AMBIDEX_CHECK(first_row <= room && num_rows <= room - first_row, "rows: ", num_rows, " from row ", first_row,
                " on do not lie in ", room);
  const PackCall call{number, rows.data(), num_rows, num_in, first_row, packed.data()};
  nb::gil_scoped_release release;
  pack_rows(call);
}

void bind_unpack_rows(const ConstBytes<2>& packed, std::string_view type, std::int64_t num_rows, const Array<const std::int64_t, 1>& indices,
                      const Array<float, 2>& to, std::optional<std::string_view> isa) {
  const Number number = find_quantized(type);
  const std::size_t num_in = num_in_of(number, packed), num_indices = indices.shape(0);
  const auto room = static_cast<std::int64_t>(packed.shape(0) * kGroupRows);
  AMBIDEX_CHECK(num_rows <= room, "num_rows: ", num_rows, " do not lie in ", room);
  check_size("to", "the indices", to, 0, num_indices);
  check_size("to", "the numbers of a row", to, 1, num_in);
  const UnpackCall call{number, static_cast<const std::uint8_t*>(packed.data()), indices.data(), num_indices, num_in,
                        to.data()};
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, call, limit = num_rows] {
    for (std::size_t i = 0; i < call.num_rows; ++i) {  // a program's indices may be others by now
      const std::int64_t index = call.indices[i];
      AMBIDEX_CHECK(index >= 0 && index < limit, "indices: ", index, " is no row of ", limit);
    }
    unpack_rows(chosen, call);
  });
}

}  // namespace

void bind_quant(nb::module_& m) {
  m.def("pack_rows", &bind_pack_rows, "packed"_a.noconvert(), "type"_a, "rows"_a.noconvert(), "first_row"_a);
  m.def("unpack_rows", &bind_unpack_rows, "packed"_a.noconvert(), "type"_a, "num_rows"_a, "indices"_a.noconvert(),
        "to"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none());
}

}  // namespace ambidex
