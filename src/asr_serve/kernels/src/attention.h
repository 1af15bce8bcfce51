// Self-attention within clips whose frames lie end to end, by AVX512-BF16. The same in torch stands in
// ../attention_reference.py.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace asr_serve {

constexpr int64_t LONGEST_HEAD = 512;

struct ClipAttention {
  const uint16_t* qkv;    // bf16 (frames of all clips, 3, heads, head_dim)
  uint16_t* out;          // bf16 (frames of all clips, heads, head_dim)
  const int64_t* frames;  // (clips,)
  int64_t clips, heads, head_dim;
  // (positions, half) of the angles by which queries and keys are rotated, halves apart; nullptr: they are not.
  const float *cos, *sin;
  int64_t half;
  float scale;
};

using AttendClips = void (*)(const ClipAttention& call, ParallelFor parallel);

// nullptr where the processor has no such instructions.
AttendClips find_clip_attention();

}  // namespace asr_serve
