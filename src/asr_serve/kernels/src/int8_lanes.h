// What the products of int8.cpp need of a vector unit: lanes of int32, each with four bytes, or two int16, to multiply
// and add up. One of these sets is chosen by what the compiler was told to use.
#pragma once
#include <cstdint>
#include <cstring>

#include "int8.h"

#if defined(__AVX2__) || defined(__AVX512BW__)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(ASR_SERVE_PLAIN)
#include <arm_neon.h>
#endif

namespace asr_serve::ASR_SERVE_ISA {
namespace {

#if defined(__AVX512BW__)

using Lanes = __m512i;
constexpr int LANES = 16, ROWS = 6, BLOCKS = 4;
inline Lanes zero() { return _mm512_setzero_si512(); }
inline Lanes load_lanes(const int8_t* from) { return _mm512_loadu_si512(from); }
inline void save_lanes(int32_t* to, Lanes x) { _mm512_storeu_si512(to, x); }
inline Lanes spread(int32_t x) { return _mm512_set1_epi32(x); }
// Bytes 0 and 2 of each lane, and bytes 1 and 3, as int16.
inline Lanes even(Lanes x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline Lanes odd(Lanes x) { return _mm512_srai_epi16(x, 8); }
inline Lanes dot16(Lanes sum, Lanes w, Lanes x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, w, x);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
}
#if defined(__AVX512VNNI__)
#define ASR_SERVE_DOTS 1
// The instruction takes one side without a sign: the weights are lifted by OFFSET, which a row takes off again.
constexpr int OFFSET = 128;
inline Lanes lifted(Lanes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80))); }
inline Lanes dot8(Lanes sum, Lanes w, Lanes x) { return _mm512_dpbusd_epi32(sum, w, x); }
#endif

#elif defined(__AVX2__)

using Lanes = __m256i;
constexpr int LANES = 8, ROWS = 6, BLOCKS = 1;
inline Lanes zero() { return _mm256_setzero_si256(); }
inline Lanes load_lanes(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void save_lanes(int32_t* to, Lanes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
inline Lanes spread(int32_t x) { return _mm256_set1_epi32(x); }
inline Lanes even(Lanes x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline Lanes odd(Lanes x) { return _mm256_srai_epi16(x, 8); }
inline Lanes dot16(Lanes sum, Lanes w, Lanes x) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, w, x);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
#endif
}
#if defined(__AVXVNNI__)
#define ASR_SERVE_DOTS 1
constexpr int OFFSET = 128;
inline Lanes lifted(Lanes w) { return _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80))); }
inline Lanes dot8(Lanes sum, Lanes w, Lanes x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#endif

#elif defined(__aarch64__) && !defined(ASR_SERVE_PLAIN)

using Lanes = int32x4_t;
constexpr int LANES = 4, ROWS = 6, BLOCKS = 1;
inline Lanes zero() { return vdupq_n_s32(0); }
inline Lanes load_lanes(const int8_t* from) { return vreinterpretq_s32_s8(vld1q_s8(from)); }
inline void save_lanes(int32_t* to, Lanes x) { vst1q_s32(to, x); }
inline Lanes spread(int32_t x) { return vdupq_n_s32(x); }
inline Lanes even(Lanes x) {
  return vreinterpretq_s32_s16(vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_s32(x), 8), 8));
}
inline Lanes odd(Lanes x) { return vreinterpretq_s32_s16(vshrq_n_s16(vreinterpretq_s16_s32(x), 8)); }
inline Lanes dot16(Lanes sum, Lanes w, Lanes x) {
  int16x8_t a = vreinterpretq_s16_s32(w), b = vreinterpretq_s16_s32(x);
  return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
}
#if defined(__ARM_FEATURE_DOTPROD)
#define ASR_SERVE_DOTS 1
constexpr int OFFSET = 0;
inline Lanes lifted(Lanes w) { return w; }
inline Lanes dot8(Lanes sum, Lanes w, Lanes x) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
#endif

#else

struct Lanes {
  int32_t at[4];
};
constexpr int LANES = 4, ROWS = 4, BLOCKS = 1;
inline Lanes zero() { return {}; }
inline Lanes load_lanes(const int8_t* from) {
  Lanes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void save_lanes(int32_t* to, Lanes x) { std::memcpy(to, &x, sizeof x); }
inline Lanes spread(int32_t x) { return {{x, x, x, x}}; }
struct Pairs {
  int16_t at[8];
};
inline Pairs pairs(Lanes x) {
  Pairs y;
  std::memcpy(&y, &x, sizeof x);
  return y;
}
inline Lanes even(Lanes x) {
  Pairs y = pairs(x);
  for (int16_t& pair : y.at) pair = int16_t(int16_t(uint16_t(pair) << 8) >> 8);
  std::memcpy(&x, &y, sizeof x);
  return x;
}
inline Lanes odd(Lanes x) {
  Pairs y = pairs(x);
  for (int16_t& pair : y.at) pair = int16_t(pair >> 8);
  std::memcpy(&x, &y, sizeof x);
  return x;
}
inline Lanes dot16(Lanes sum, Lanes w, Lanes x) {
  Pairs a = pairs(w), b = pairs(x);
  for (int i = 0; i < 4; ++i) sum.at[i] += a.at[2 * i] * b.at[2 * i] + a.at[2 * i + 1] * b.at[2 * i + 1];
  return sum;
}

#endif

#if !defined(ASR_SERVE_DOTS)
// Without an instruction for it 8-bit rows go the way of 16-bit ones.
#define ASR_SERVE_DOTS 0
constexpr int OFFSET = 0;
#endif

}  // namespace
}  // namespace asr_serve::ASR_SERVE_ISA
