// Products of bf16 rows with packed bf16 weights by the processor's own instructions: matrix tiles (Intel AMX), or
// AVX512-BF16. The same in torch stands in ../bf16_reference.py.
#pragma once
#include "activations.h"
#include "kernels.h"

namespace asr_serve {

constexpr int BF16_OUTPUTS = 16, BF16_INPUTS = 2;  // of a block of a packed weight

struct Bf16Product {
  const uint16_t* x;       // (rows, inputs)
  const uint16_t* packed;  // (blocks, inputs / 2, 16, 2)
  const float* bias;       // (blocks * 16,), or nullptr
  const uint16_t* add;     // (rows, outputs), or nullptr
  void* out;               // (rows, outputs)
  bool out_float;          // float instead of bf16
  // Blocks are those of a gate and of its counterpart in turn, and an output is act(gate) * counterpart.
  Activation activation;
  int64_t rows, inputs, blocks, outputs;
};

using MultiplyBf16 = void (*)(const Bf16Product& product, ParallelFor parallel);

// For rows of that many inputs; nullptr where the processor has no such instruction.
MultiplyBf16 find_bf16(int64_t inputs);

}  // namespace asr_serve
