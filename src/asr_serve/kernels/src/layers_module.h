// The Python face of layers.h.
#pragma once
#include <nanobind/nanobind.h>

#include "layers.h"

namespace asr_serve {

// `run` is read at every call: tests force instruction sets.
void add_layers(nanobind::module_& m, const RunLayers* run, ParallelFor parallel);

}  // namespace asr_serve
