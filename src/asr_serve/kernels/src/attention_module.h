// The Python face of attention.h.
#pragma once
#include <nanobind/nanobind.h>

#include "kernels.h"

namespace asr_serve {

void add_attention(nanobind::module_& m, ParallelFor parallel);

}  // namespace asr_serve
