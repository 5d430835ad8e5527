// ambidex._native, attention over tiled pools: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include "ops/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "bind/attention.h"
#include "bind/bounded.h"
#include "bind/calls.h"
#include "core/check.h"
#include "core/program.h"
#include "ops/script.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

using Ids = Array<const std::int64_t, 1>;

// [Hkv, n, D], the rows of each head side by side.
using RowsOfHeads = nb::ndarray<nb::ndim<3>, nb::device::cpu>;

KVPart find_part(std::string_view name) {
  AMBIDEX_CHECK(name == "k" || name == "v", "part: expected k or v, got \"", name, "\"");
  return name == "k" ? KVPart::kK : KVPart::kV;
}

// Rows of int4 are whole packed rows (ops/kv_int4.h), which need no padding.
template <class A>
TiledPart describe(std::string_view part, const A& records, std::size_t row_size, bool is_packed) {
  const TiledPart described{find_part(part), make_tiles(records.itemsize(), records.shape(2), records.shape(3)),
                            records.shape(0), records.shape(1), row_size};
  check_size("pool", "head_dim, padded to a multiple of 32", records, 3, is_packed ? row_size : padded(row_size));
  return described;
}

template <class A>
TiledPart describe(std::string_view part, const A& records, std::size_t row_size) {
  return describe(part, records, row_size, records.dtype() == nb::dtype<std::uint8_t>());
}

void check_ids(const char* name, const Ids& ids, std::size_t limit) {
  for (std::size_t i = 0; i < ids.shape(0); ++i) {
    const std::int64_t id = ids.data()[i];
    AMBIDEX_CHECK(id >= 0 && static_cast<std::size_t>(id) < limit, name, ": expected 0 to ", limit, " (not included), got ",
                  id);
  }
}

void make_key_batch(KeyBatch* self, const Ids& block_ids, const Ids& block_offsets, const Ids& first_key,
                    const Ids& num_keys, const Ids& row_offsets, std::size_t block_size) {
  const std::size_t num_requests = first_key.shape(0);
  check_size("num_keys", "R", num_keys, 0, num_requests);
  check_size("block_offsets", "R + 1", block_offsets, 0, num_requests + 1);
  check_size("row_offsets", "R + 1", row_offsets, 0, num_requests + 1);
  AMBIDEX_CHECK(block_size >= 1, "block_size: expected at least 1, got 0");
  new (self) KeyBatch(block_ids.data(), block_ids.shape(0), block_offsets.data(), first_key.data(), num_keys.data(),
                      row_offsets.data(), num_requests, block_size);
}

void assign_keys(KeyBatch& self, const Ids& block_ids, const Ids& block_offsets, const Ids& first_key,
                 const Ids& num_keys, const Ids& row_offsets) {
  const std::size_t num_requests = first_key.shape(0);
  check_size("num_keys", "R", num_keys, 0, num_requests);
  check_size("block_offsets", "R + 1", block_offsets, 0, num_requests + 1);
  check_size("row_offsets", "R + 1", row_offsets, 0, num_requests + 1);
  self.assign(block_ids.data(), block_ids.shape(0), block_offsets.data(), first_key.data(), num_keys.data(),
              row_offsets.data(), num_requests);
}

void set_positions(KeyBatch& self, const Ids& of_blocks, const Ids& of_rows) {
  self.set_positions(of_blocks.data(), of_blocks.shape(0), of_rows.data(), of_rows.shape(0));
}

void bind_attend(AttentionPool& self, const ConstBytes<3>& q, std::string_view q_number, const ConstBytes<4>& k,
                 const ConstBytes<4>& v, std::string_view k_number, std::string_view v_number,
                 const std::optional<Scales>& k_scales, const std::optional<Scales>& v_scales, const KeyBatch& batch,
                 float scale, const Array<float, 3>& out, const Array<float, 2>& lse,
                 const std::optional<Array<const float, 1>>& slopes, std::optional<std::string_view> isa) {
  AttendCall call = make_call(q, q_number, k, v, k_number, v_number, k_scales, v_scales, scale, out, lse);
  if (slopes) {
    check_size("slopes", "Hq", *slopes, 0, q.shape(1));
    call.slopes = slopes->data();
  }
  check_batch(call, batch);
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([&self, chosen, call, &batch] {
    check_batch(call, batch);  // a program's batch may have been given other keys
    self.attend(chosen, call, batch);
  });
}

using Words = Array<std::int32_t, 2>;

void make_script(AttentionScript* self, AttentionPool& pool, const Words& asked, const Words& answered,
                 const Words& streamed, std::optional<std::string_view> isa) {
  for (const Words* words : {&asked, &answered, &streamed}) {
    check_size("words", "a word in each cache line", *words, 1, AttentionScript::kWordStride);
    check_size("words", "the layers of asked", *words, 0, asked.shape(0));
  }
  new (self) AttentionScript(pool, choose_isa(isa), asked.data(), answered.data(), streamed.data(), asked.shape(0));
}

void bind_add_layer(AttentionScript& self, const ConstBytes<3>& q, std::string_view q_number, const ConstBytes<4>& k,
                    const ConstBytes<4>& v, std::string_view k_number, std::string_view v_number,
                    const std::optional<Scales>& k_scales, const std::optional<Scales>& v_scales, float scale,
                    const Array<float, 3>& out, const Array<float, 2>& lse) {
  AMBIDEX_CHECK(self.layers().size() < self.num_layers(), "add_layer: all ", self.num_layers(), " layers are there");
  self.add_layer(make_call(q, q_number, k, v, k_number, v_number, k_scales, v_scales, scale, out, lse));
}

void bind_bound_layer(AttentionScript& self, BoundedPool& pool, const BoundedArrays& arrays) {
  AMBIDEX_CHECK(self.bounded_layers().size() + 1 == self.layers().size(), "bound_layer: add the layer first");
  const BoundedCall& call = arrays.call();
  AMBIDEX_CHECK(call.near_lse == nullptr || call.near_lse == self.layers().back().lse,
                "bound_layer: near_lse is not that of the layer");
  self.bound_layer(pool, call);
}

std::pair<std::size_t, std::size_t> bind_run(AttentionScript& self, const std::vector<const KeyBatch*>& batches,
                                             double limit_s, const std::vector<const KeyBatch*>& scanned) {
  AMBIDEX_CHECK(self.layers().size() == self.num_layers() && batches.size() == self.num_layers(), "run: expected ",
                self.num_layers(), " layers and batches, got ", self.layers().size(), " and ", batches.size());
  AMBIDEX_CHECK(limit_s >= 0.0 && limit_s <= 3600.0, "limit_s: expected 0 to 3600 seconds, got ", limit_s);
  for (std::size_t layer = 0; layer < batches.size(); ++layer) check_batch(self.layers()[layer], *batches[layer]);
  AMBIDEX_CHECK(scanned.size() == self.bounded_layers().size(), "run: expected ", self.bounded_layers().size(),
                " batches of scanned keys, got ", scanned.size());
  AMBIDEX_CHECK(scanned.empty() || scanned.size() == self.num_layers(), "run: ", scanned.size(), " of ", self.num_layers(),
                " layers are bounded: expected all or none");
  for (std::size_t layer = 0; layer < scanned.size(); ++layer) check_batch(self.bounded_layers()[layer].scan, *scanned[layer]);
  const auto limit = std::chrono::microseconds(static_cast<std::int64_t>(limit_s * 1e6));
  nb::gil_scoped_release release;
  const AttentionScript::Outcome outcome = self.run(batches, scanned, limit);
  return {outcome.num_answered, outcome.num_last};
}

void bind_store_rows(AttentionPool& self, std::string_view part, const Bytes<4>& pool, const Ids& slots,
                     const ConstBytes<3>& rows) {
  const TiledPart to = describe(part, pool, rows.shape(2));
  check_itemsize("rows", rows, pool.itemsize());
  check_size("rows", "the slots", rows, 0, slots.shape(0));
  check_size("rows", "Hkv", rows, 1, pool.shape(0));
  check_ids("slots", slots, to.num_blocks * to.tiles.block_size);
  nb::gil_scoped_release release;
  std::lock_guard<std::mutex> lock(self.threads().mutex());
  store_rows(self.threads(), to, static_cast<char*>(pool.data()), slots.data(), slots.shape(0),
             static_cast<const char*>(rows.data()));
}

void bind_store_values(AttentionPool&, std::string_view part, const Bytes<4>& pool, std::string_view number_name,
                       const std::optional<ScalesOf<float>>& scales, const Ids& slots, const Array<const float, 3>& rows,
                       std::optional<std::string_view> isa) {
  const Number number = find_number(number_name);
  const bool is_packed = number == Number::kInt4;
  const TiledPart to = describe(part, pool, is_packed ? padded(rows.shape(2)) / 2 : rows.shape(2), is_packed);
  check_itemsize("pool", pool, size_of(number));
  float* const words = scales_of("scales", scales, pool, number);
  check_size("rows", "the slots", rows, 0, slots.shape(0));
  check_size("rows", "Hkv", rows, 1, pool.shape(0));
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  perform([chosen, number, to, records = static_cast<char*>(pool.data()), words, slots = slots.data(),
           num_rows = slots.shape(0), head_dim = rows.shape(2), rows = rows.data()] {
    store_values(chosen, number, to, records, words, slots, num_rows, head_dim, rows);
  });
}

void bind_pack_blocks(AttentionPool& self, std::string_view part, const Bytes<4>& pool, const Ids& block_ids,
                      const ConstBytes<3>& rows) {
  const TiledPart to = describe(part, pool, rows.shape(2));
  check_itemsize("rows", rows, pool.itemsize());
  check_size("rows", "Hkv", rows, 0, pool.shape(0));
  check_size("rows", "the rows of the blocks", rows, 1, block_ids.shape(0) * to.tiles.block_size);
  check_ids("block_ids", block_ids, to.num_blocks);
  nb::gil_scoped_release release;
  std::lock_guard<std::mutex> lock(self.threads().mutex());
  pack_blocks(self.threads(), to, static_cast<char*>(pool.data()), block_ids.data(), block_ids.shape(0),
              static_cast<const char*>(rows.data()));
}

void bind_copy_rows(AttentionPool& self, std::string_view part, const ConstBytes<4>& pool, const Ids& block_ids,
                      const Ids& places, const RowsOfHeads& rows) {
  const TiledPart from = describe(part, pool, rows.shape(2));
  check_itemsize("rows", rows, pool.itemsize());
  check_size("rows", "Hkv", rows, 0, pool.shape(0));
  check_size("places", "the blocks", places, 0, block_ids.shape(0));
  check_ids("block_ids", block_ids, from.num_blocks);
  const auto head_dim = static_cast<std::int64_t>(rows.shape(2));
  AMBIDEX_CHECK(rows.size() == 0 || (rows.stride(2) == 1 && rows.stride(1) == head_dim &&
                                     rows.stride(0) >= head_dim * static_cast<std::int64_t>(rows.shape(1))),
                "rows: expected those of a head side by side");
  const RowTarget to{static_cast<char*>(rows.data()), rows.shape(1),
                     static_cast<std::size_t>(rows.size() == 0 ? 0 : rows.stride(0)) * rows.itemsize()};
  nb::gil_scoped_release release;
  std::lock_guard<std::mutex> lock(self.threads().mutex());
  copy_rows(self.threads(), from, static_cast<const char*>(pool.data()), block_ids.data(), places.data(),
              block_ids.shape(0), to);
}

void bind_exp2(const Array<const float, 1>& x, const Array<float, 1>& y, std::optional<std::string_view> isa) {
  check_size("y", "the numbers of x", y, 0, x.shape(0));
  exp2_each(choose_isa(isa), x.data(), y.data(), x.shape(0));
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<KeyBatch>(m, "KeyBatch")
      .def("__init__", &make_key_batch, "block_ids"_a.noconvert(), "block_offsets"_a.noconvert(),
           "first_key"_a.noconvert(), "num_keys"_a.noconvert(), "row_offsets"_a.noconvert(), nb::kw_only(),
           "block_size"_a)
      .def("assign", &assign_keys, "block_ids"_a.noconvert(), "block_offsets"_a.noconvert(), "first_key"_a.noconvert(),
           "num_keys"_a.noconvert(), "row_offsets"_a.noconvert())
      .def("set_positions", &set_positions, "of_blocks"_a.noconvert(), "of_rows"_a.noconvert())
      .def_prop_ro("num_rows", &KeyBatch::num_rows)
      .def_prop_ro("block_size", &KeyBatch::block_size);
  nb::class_<AttentionPool>(m, "AttentionPool")
      .def(nb::init<ThreadPool&>(), "threads"_a, nb::keep_alive<1, 2>())
      .def("attend_blocks", &bind_attend, "q"_a.noconvert(), "q_number"_a, "k"_a.noconvert(), "v"_a.noconvert(),
           "k_number"_a, "v_number"_a, "k_scales"_a.noconvert().none(), "v_scales"_a.noconvert().none(), "batch"_a,
           "scale"_a, "out"_a.noconvert(), "lse"_a.noconvert(), nb::kw_only(), "slopes"_a.noconvert().none() = nb::none(),
           "isa"_a = nb::none())
      .def("store_rows", &bind_store_rows, "part"_a, "pool"_a.noconvert(), "slots"_a.noconvert(), "rows"_a.noconvert())
      .def("store_values", &bind_store_values, "part"_a, "pool"_a.noconvert(), "number"_a, "scales"_a.noconvert().none(),
           "slots"_a.noconvert(), "rows"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none())
      .def("pack_blocks", &bind_pack_blocks, "part"_a, "pool"_a.noconvert(), "block_ids"_a.noconvert(),
           "rows"_a.noconvert())
      .def("copy_rows", &bind_copy_rows, "part"_a, "pool"_a.noconvert(), "block_ids"_a.noconvert(),
           "places"_a.noconvert(), "rows"_a.noconvert());
  nb::class_<AttentionScript>(m, "AttentionScript")
      .def("__init__", &make_script, "pool"_a, "asked"_a.noconvert(), "answered"_a.noconvert(),
           "streamed"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none(), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("add_layer", &bind_add_layer, "q"_a.noconvert(), "q_number"_a, "k"_a.noconvert(), "v"_a.noconvert(),
           "k_number"_a, "v_number"_a, "k_scales"_a.noconvert().none(), "v_scales"_a.noconvert().none(), "scale"_a,
           "out"_a.noconvert(), "lse"_a.noconvert(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 11>(),
           nb::keep_alive<1, 12>())
      .def("run", &bind_run, "batches"_a, "limit_s"_a, "scanned"_a)
      .def_prop_ro("busy_s", [](const AttentionScript& self) { return self.busy().count(); })
      .def("bound_layer", &bind_bound_layer, "pool"_a, "arrays"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  m.def("exp2", &bind_exp2, "x"_a.noconvert(), "y"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none());
}

}  // namespace ambidex
