// Activations of feed-forward gates. For files that are compiled once per instruction set.
#pragma once
#include "floats.h"

namespace asr_serve {

enum class Activation { none, silu, gelu_tanh };

namespace ASR_SERVE_ISA {
namespace {

// x * sigmoid(exponent).
inline float gated(float x, float exponent) {
  float e = exp_negative(-std::fabs(exponent));
  return x * (exponent < 0 ? e : 1.0f) / (1.0f + e);
}
inline float silu(float x) { return gated(x, x); }
// 0.5 (1 + tanh(u)) = sigmoid(2 u).
inline float gelu_tanh(float x) { return gated(x, 1.5957691216f * (x + 0.044715f * x * x * x)); }

// to = act(gate) * up.
template <typename T>
inline void gate_numbers(const T* gate, const T* up, T* to, int64_t n, Activation activation) {
  if (activation == Activation::silu) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) save(to + i, silu(load(gate[i])) * load(up[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) save(to + i, gelu_tanh(load(gate[i])) * load(up[i]));
  }
}

}  // namespace
}  // namespace ASR_SERVE_ISA
}  // namespace asr_serve
