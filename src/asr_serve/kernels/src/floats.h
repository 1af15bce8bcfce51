// Numbers as every kernel reads and writes them, exp and softmax. For files that are compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

inline float load(float x) { return x; }
inline float load(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void save(float* to, float x) { *to = x; }
inline void save(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;          // nearest, ties to even
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;                            // rounding must not make it infinity
  to->bits = uint16_t(nan ? ((bits >> 16) | 0x40u) : rounded);
}

// exp for x <= 0, 2 ulp: 2^n by exponent bits times a degree-6 polynomial of the remainder. Below -87 it
// is 0, and NaN stays NaN.
inline float exp_negative(float x) {
  float clamped = x < -87.0f ? -87.0f : x;
  float n = std::nearbyintf(clamped * 1.44269504f);
  float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : p * power;
}

// softmax(scale * x) in place.
inline void softmax_floats(float* x, int64_t n, float scale) {
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = std::max(top, x[i]);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    x[i] = exp_negative((x[i] - top) * scale);
    total += x[i];
  }
  const float inverse = 1.0f / total;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= inverse;
}

template <typename F>
void run(int64_t items, ParallelFor parallel, F& each) {
  parallel(items, [](void* context, int64_t item) { (*static_cast<F*>(context))(item); }, &each);
}

}  // namespace
}  // namespace asr_serve::ASR_SERVE_ISA
