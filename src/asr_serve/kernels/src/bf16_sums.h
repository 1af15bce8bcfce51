// How sums over bf16 numbers become outputs: for files that are compiled for AVX512-BF16.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "activations.h"
#include "bf16.h"

namespace asr_serve {
namespace ASR_SERVE_ISA {
namespace {

inline __m512 widen(const uint16_t* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline void save_sums(const Bf16Product& p, int64_t row, int64_t first, __m512 y) {
  const int64_t count = std::min<int64_t>(BF16_OUTPUTS, p.outputs - first), at = row * p.outputs + first;
  if (count <= 0) return;
  const __mmask16 mask = __mmask16((1u << count) - 1);
  if (p.add) y = _mm512_add_ps(y, widen(p.add + at, mask));
  if (p.out_float)
    _mm512_mask_storeu_ps(static_cast<float*>(p.out) + at, mask, y);
  else
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(p.out) + at, mask, (__m256i)_mm512_cvtneps_pbh(y));
}

// Of a gate's block, an even one, and its counterpart's.
inline void save_gated(const Bf16Product& p, int64_t row, int64_t block, __m512 gates, __m512 ups) {
  float gate[BF16_OUTPUTS], up[BF16_OUTPUTS];
  _mm512_storeu_ps(gate, gates);
  _mm512_storeu_ps(up, ups);
  gate_numbers(gate, up, gate, BF16_OUTPUTS, p.activation);
  save_sums(p, row, block / 2 * BF16_OUTPUTS, _mm512_loadu_ps(gate));
}

}  // namespace
}  // namespace ASR_SERVE_ISA
}  // namespace asr_serve
