// The Python face of voice_activity.h.
#pragma once
#include <nanobind/nanobind.h>

#include "voice_activity.h"

namespace asr_serve {

// `encode` is read at every call: tests force instruction sets.
void add_voice_activity(nanobind::module_& m, const VadEncode* encode, ParallelFor parallel);

}  // namespace asr_serve
