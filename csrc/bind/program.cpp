// ambidex._native, programs: recorded ops, run again with the GIL released.
#include "bind/program.h"

#include "core/program.h"

namespace nb = nanobind;

namespace ambidex {

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("run", &Program::run, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("num_ops", &Program::num_ops);
}

}  // namespace ambidex
