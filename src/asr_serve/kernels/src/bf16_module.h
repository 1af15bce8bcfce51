// The Python face of bf16.h.
#pragma once
#include <nanobind/nanobind.h>

#include "kernels.h"

namespace asr_serve {

void add_bf16(nanobind::module_& m, ParallelFor parallel);

}  // namespace asr_serve
