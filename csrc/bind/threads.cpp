// ambidex._native, the thread pool and what memory gives to it.
#include "bind/threads.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>

#include "bind/arrays.h"
#include "core/pool.h"
#include "ops/read.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ambidex {
namespace {

std::uint64_t bind_read(ThreadPool& self, const Array<const std::uint8_t, 1>& bytes,
                        std::optional<std::string_view> isa) {
  const Isa chosen = choose_isa(isa);
  nb::gil_scoped_release release;
  return read_all(chosen, self, reinterpret_cast<const char*>(bytes.data()), bytes.shape(0));
}

}  // namespace

void bind_threads(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<std::size_t, std::size_t>(), nb::kw_only(), "num_threads"_a, "spin_us"_a)
      .def_prop_ro("num_threads", &ThreadPool::num_threads)
      .def_prop_ro("num_pin_failures", &ThreadPool::num_pin_failures)
      .def("read", &bind_read, "bytes"_a.noconvert(), nb::kw_only(), "isa"_a = nb::none());
}

}  // namespace ambidex
