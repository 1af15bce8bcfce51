// The Python face of attention.h.
#pragma once
#include <nanobind/nanobind.h>

#include "attention.h"
#include "kernels.h"

namespace asr_serve {

// chosen_f32: returns the kernel of float32 for the instruction set that is in use.
void add_attention(nanobind::module_& m, ParallelFor parallel, AttendClips<float> (*chosen_f32)());

}  // namespace asr_serve
