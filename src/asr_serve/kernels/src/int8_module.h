// The Python face of int8.h.
#pragma once
#include <nanobind/nanobind.h>

#include "kernels.h"

namespace asr_serve {

void add_int8(nanobind::module_& m, ParallelFor parallel);

}  // namespace asr_serve
