// The Python face of decoder layers.
#pragma once
#include <nanobind/nanobind.h>

#include "decoder.h"
#include "int8_pages.h"
#include "kernels.h"

namespace asr_serve {

// Where the module keeps what it has chosen for this processor.
struct ChosenKernels {
  const Kernels<float>* const* f32;
  const Kernels<bf16>* const* b16;
  const DecoderKernels<float>* const* decoder_f32;
  const DecoderKernels<bf16>* const* decoder_b16;
  const Int8PageKernels<float>* const* int8_pages_f32;
  const Int8PageKernels<bf16>* const* int8_pages_b16;
};

void add_decoder_layers(nanobind::module_& m, const ChosenKernels& chosen, unsigned (*thread_count)(),
                        ParallelFor parallel);

}  // namespace asr_serve
