// Vectors of numbers, as wide as the instruction set has them. For files that are compiled once per instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

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

}  // namespace
}  // namespace asr_serve::ASR_SERVE_ISA
