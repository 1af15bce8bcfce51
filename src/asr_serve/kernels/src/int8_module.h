// The Python face of int8.h.
#pragma once
#include <nanobind/nanobind.h>

#include "int8.h"

namespace asr_serve {

void add_int8(nanobind::module_& m, ParallelFor parallel);

// The products of the instruction set in use.
const Int8Kernels& int8_kernels();
// Weights of an Int8Linear. Throws nanobind::cast_error for other objects.
Int8Weights int8_weights(nanobind::handle linear);

}  // namespace asr_serve
