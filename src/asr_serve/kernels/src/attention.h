// Self-attention within clips whose frames lie end to end, in bf16 by AVX512-BF16, and in float32. The same in torch
// stands in ../attention_reference.py.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace asr_serve {

constexpr int64_t LONGEST_HEAD = 512;

template <typename T>
struct ClipAttention {
  const T* qkv;           // (frames of all clips, 3, heads, head_dim)
  T* out;                 // (frames of all clips, heads, head_dim)
  const int64_t* frames;  // (clips,)
  int64_t clips, heads, head_dim;
  // (positions, half) of the angles by which queries and keys are rotated, halves apart; nullptr: they are not.
  const float *cos, *sin;
  int64_t half;
  float scale;
};

template <typename T>
using AttendClips = void (*)(const ClipAttention<T>& call, ParallelFor parallel);

// The kernel of bf16; nullptr where the processor has no such instructions.
AttendClips<uint16_t> find_clip_attention();

namespace generic {
extern const AttendClips<float> attend_clips_f32;
}
namespace avx2 {
extern const AttendClips<float> attend_clips_f32;
}
namespace avx512 {
extern const AttendClips<float> attend_clips_f32;
}

}  // namespace asr_serve
