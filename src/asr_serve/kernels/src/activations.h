// Activations of feed-forward layers. For files that are compiled once per instruction set.
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

// gelu(x) = x / 2 (1 + erf(x / sqrt 2)); erf to 3e-7 by Abramowitz and Stegun 7.1.28, which needs no exponential.
__attribute__((always_inline)) inline float gelu(float x) {
  float z = std::fabs(x) * 0.70710678f;
  float p = 4.30638e-5f;
  p = p * z + 2.765672e-4f;
  p = p * z + 1.520143e-4f;
  p = p * z + 9.2705272e-3f;
  p = p * z + 4.22820123e-2f;
  p = p * z + 7.05230784e-2f;
  p = p * z + 1.0f;
  p *= p, p *= p, p *= p, p *= p;
  float tail = 0.5f / p;
  return x * (x < 0 ? tail : 1.0f - tail);
}

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
