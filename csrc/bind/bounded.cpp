// ambidex._native, bounded attention: typed arrays in, checks, GIL released around each op. No arithmetic here.
#include "bind/bounded.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <mutex>
#include <optional>
#include <string_view>

#include "bind/arrays.h"
#include "bind/calls.h"
#include "core/program.h"
#include "ops/scan_copy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

using Ids = Array<const std::int64_t, 1>;
using Norms = Array<float, 3>;

template <class A, class B>
void check_alike(const char* name, const A& array, const B& other, std::size_t num_axes) {
  for (std::size_t axis = 0; axis < num_axes; ++axis) check_size(name, "an axis of another", array, axis, other.shape(axis));
}

void make_arrays(BoundedArrays* self, const ConstBytes<3>& q, std::string_view q_number, const ConstBytes<4>& scanned,
                 const Scales& scales, const std::optional<ConstBytes<4>>& rows, const ConstBytes<4>& v,
                 std::string_view number, const std::optional<Scales>& v_scales, const Norms& norms, float scale,
                 float max_mass, const std::optional<Array<const float, 3>>& near_out,
                 const std::optional<Array<const float, 2>>& near_lse,
                 const std::optional<Array<const float, 2>>& other_lse, const Array<float, 3>& out,
                 const Array<float, 2>& lse, const Array<float, 3>& figures,
                 const std::optional<Array<std::int32_t, 1>>& kept_of_block) {
  BoundedCall call{};
  call.scan = make_call(q, q_number, scanned, scanned, "int8", "int8", scales, scales, scale, out, lse);
  call.v_number = find_number(number);
  AMBIDEX_CHECK(call.v_number != Number::kInt4, "number: bounded attention has no form for int4");
  check_itemsize("v", v, size_of(call.v_number));
  check_alike("v", v, scanned, 4);
  const bool is_int8 = call.v_number == Number::kInt8;
  AMBIDEX_CHECK(rows.has_value() != is_int8, "rows: are given where K is not int8, and nowhere else");
  if (rows) {
    check_itemsize("rows", *rows, size_of(call.v_number));
    check_alike("rows", *rows, scanned, 3);
    check_size("rows", "K and V of a key", *rows, 3, 2 * scanned.shape(3));
    call.rows = static_cast<const char*>(rows->data());
  }
  call.v_tiles = make_tiles(v.itemsize(), v.shape(2), v.shape(3));
  call.v = static_cast<const char*>(v.data());
  call.v_scales = scales_of("v_scales", v_scales, v, call.v_number);
  check_alike("norms", norms, scanned, 2);
  check_size("norms", "K and V", norms, 2, 2);
  call.norms = norms.data();
  AMBIDEX_CHECK(max_mass >= 0.0f && max_mass < 1.0f, "max_mass: expected at least 0 and below 1, got ", max_mass);
  call.max_mass = max_mass;
  AMBIDEX_CHECK(near_out.has_value() == near_lse.has_value(), "near_out and near_lse: expected both or none");
  if (near_out) {
    check_alike("near_out", *near_out, out, 3);
    check_alike("near_lse", *near_lse, lse, 2);
    call.near_out = near_out->data();
    call.near_lse = near_lse->data();
  }
  if (other_lse) {
    check_alike("other_lse", *other_lse, lse, 2);
    call.other_lse = other_lse->data();
  }
  check_alike("figures", figures, lse, 2);
  check_size("figures", "the figures of a head", figures, 2, kNumBoundedFigures);
  call.figures = figures.data();
  if (kept_of_block) {
    check_size("kept_of_block", "the blocks", *kept_of_block, 0, scanned.shape(1));
    call.kept_of_block = kept_of_block->data();
  }
  new (self) BoundedArrays(call);
}

void bind_attend(BoundedPool& self, const BoundedArrays& arrays, const KeyBatch& batch, std::optional<std::string_view> isa) {
  BoundedCall call = arrays.call();
  call.tuning = self.tuning();
  AMBIDEX_CHECK(call.other_lse == nullptr, "other_lse: only a script can wait for it");
  check_batch(call.scan, batch);
  const BoundedForm form = bounded_form(choose_isa(isa));
  nb::gil_scoped_release release;
  perform([&self, form, call, &batch] {
    check_batch(call.scan, batch);  // a program's batch may have been given other keys
    self.attend(form, call, batch);
  });
}

void bind_copy(BoundedPool& self, const ConstBytes<4>& k, const ConstBytes<4>& v, std::string_view number,
               const std::optional<Scales>& k_scales, const std::optional<Scales>& v_scales, std::size_t head_dim,
               const Ids& block_ids, const std::optional<Array<std::int8_t, 4>>& scanned,
               const std::optional<Array<float, 3>>& scales, const std::optional<Bytes<4>>& rows, const Norms& norms,
               std::optional<std::string_view> isa) {
  ScanCopyCall call{};
  call.number = find_number(number);
  AMBIDEX_CHECK(call.number != Number::kInt4, "number: bounded attention has no form for int4");
  check_itemsize("k", k, size_of(call.number));
  check_itemsize("v", v, size_of(call.number));
  check_alike("v", v, k, 4);
  check_size("k", "head_dim, padded to a multiple of 32", k, 3, padded(head_dim));
  const bool is_int8 = call.number == Number::kInt8;
  call.tiles = make_tiles(k.itemsize(), k.shape(2), k.shape(3));
  call.num_heads = k.shape(0);
  call.num_blocks = k.shape(1);
  call.head_dim = head_dim;
  call.k = static_cast<const char*>(k.data());
  call.v = static_cast<const char*>(v.data());
  call.k_scales = scales_of("k_scales", k_scales, k, call.number);
  call.v_scales = scales_of("v_scales", v_scales, v, call.number);
  AMBIDEX_CHECK(scanned.has_value() != is_int8 && scales.has_value() != is_int8 && rows.has_value() != is_int8,
                "scanned, scales and rows: are made where K is not int8, and nowhere else");
  if (!is_int8) {
    check_alike("scanned", *scanned, k, 4);
    check_alike("scales", *scales, k, 3);
    check_alike("rows", *rows, k, 3);
    check_size("rows", "K and V of a key", *rows, 3, 2 * k.shape(3));
    check_itemsize("rows", *rows, size_of(call.number));
    call.scanned = scanned->data();
    call.scales = scales->data();
    call.rows = static_cast<char*>(rows->data());
  }
  check_alike("norms", norms, k, 2);
  check_size("norms", "K and V", norms, 2, 2);
  call.norms = norms.data();
  for (std::size_t i = 0; i < block_ids.shape(0); ++i) {
    const std::int64_t id = block_ids.data()[i];
    AMBIDEX_CHECK(id >= 0 && static_cast<std::size_t>(id) < call.num_blocks, "block_ids: expected 0 to ", call.num_blocks,
                  " (not included), got ", id);
  }
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  std::lock_guard<std::mutex> lock(self.threads().mutex());
  copy_for_scan(self.threads(), chosen, call, block_ids.data(), block_ids.shape(0));
}

}  // namespace

void bind_bounded(nb::module_& m) {
  nb::class_<BoundedArrays>(m, "BoundedArrays")
      .def("__init__", &make_arrays, "q"_a.noconvert(), "q_number"_a, "scanned"_a.noconvert(), "scales"_a.noconvert(),
           "rows"_a.noconvert().none(), "v"_a.noconvert(), "number"_a, "v_scales"_a.noconvert().none(),
           "norms"_a.noconvert(), "scale"_a, "max_mass"_a, "near_out"_a.noconvert().none(),
           "near_lse"_a.noconvert().none(), "other_lse"_a.noconvert().none(), "out"_a.noconvert(), "lse"_a.noconvert(),
           "figures"_a.noconvert(), "kept_of_block"_a.noconvert().none());
  nb::class_<BoundedTuning>(m, "BoundedTuning")
      .def_rw("scan_far_bytes", &BoundedTuning::scan_far_bytes)
      .def_rw("is_near_fetched_late", &BoundedTuning::is_near_fetched_late)
      .def_rw("code_pieces_ahead", &BoundedTuning::code_pieces_ahead)
      .def_rw("keep_far_keys", &BoundedTuning::keep_far_keys)
      .def_rw("keep_near_keys", &BoundedTuning::keep_near_keys)
      .def_rw("is_keep_fetch_spread", &BoundedTuning::is_keep_fetch_spread);
  nb::class_<BoundedPool>(m, "BoundedPool")
      .def(nb::init<ThreadPool&>(), "threads"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("tuning", [](BoundedPool& self) -> BoundedTuning& { return self.tuning(); },
                   nb::rv_policy::reference_internal)
      .def("attend", &bind_attend, "arrays"_a, "batch"_a, nb::kw_only(), "isa"_a = nb::none())
      .def("take_phase_seconds", &BoundedPool::take_phase_seconds)
      .def("copy_for_scan", &bind_copy, "k"_a.noconvert(), "v"_a.noconvert(), "number"_a, "k_scales"_a.noconvert().none(),
           "v_scales"_a.noconvert().none(), "head_dim"_a, "block_ids"_a.noconvert(), "scanned"_a.noconvert().none(),
           "scales"_a.noconvert().none(), "rows"_a.noconvert().none(), "norms"_a.noconvert(), nb::kw_only(),
           "isa"_a = nb::none());
}

}  // namespace ambidex
