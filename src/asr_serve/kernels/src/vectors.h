// Vectors of numbers, as wide as the instruction set has them. For files that are compiled once per instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace asr_serve::ASR_SERVE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

inline Vec load_vec(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline Vec load_vec(const bf16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof(x));
  return (Vec)(__builtin_convertvector(x, Words) << 16);
}
inline Vec load_vec(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bytes x;
  std::memcpy(&x, from, sizeof(x));
  return __builtin_convertvector(x, Vec);
#endif
}

}  // namespace
}  // namespace asr_serve::ASR_SERVE_ISA
