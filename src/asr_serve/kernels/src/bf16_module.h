// The Python face of bf16.h.
#pragma once
#include <nanobind/nanobind.h>

#include "bf16.h"

namespace asr_serve {

void add_bf16(nanobind::module_& m, ParallelFor parallel);

// Product of a Bf16Linear, without rows, and the function that computes it. Throws nanobind::cast_error for other objects.
Bf16Product bf16_product(nanobind::handle linear, MultiplyBf16& multiply);

}  // namespace asr_serve
