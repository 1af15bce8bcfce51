// What streaming encoders compute. ../streaming_reference.py has the reference of every function.
//
// Strides count elements. The last axis of every view is contiguous, but for `bias`. T is float or bf16.
#pragma once
#include "kernels.h"

namespace asr_serve {

// Frames of heads, of one row after the other: (rows, frames, heads, head_dim).
template <typename T>
struct Frames {
  T* data;
  int64_t row, frame, head;
};

// What sessions keep: (slots, heads, capacity, head_dim). Frame p of a session lies at p % capacity.
template <typename T>
struct Ring {
  T* data;
  int64_t slot, head, frame;
};

// Scores to add: (rows, heads, frames, left + frames), any strides.
struct Bias {
  const void* data;  // nullptr: none
  bool single;       // float32, else T
  int64_t row, head, frame, column;
};

// Which frames a step brings, and where its rows stand.
struct Step {
  int64_t rows, frames;
  const int64_t *slots, *seen, *live;
};

template <typename T>
struct WindowAttention {
  Step step;
  int64_t heads, head_dim, capacity, left, block;
  Frames<const T> q, k, v;
  Ring<T> keys, values;
  Bias bias;
  Frames<T> out;
};

template <typename T>
struct CausalConv {
  Step step;
  int64_t channels, taps;
  Frames<const T> x;  // one head
  const T* weight;    // (channels, taps)
  int64_t weight_channel, weight_tap;
  const T* bias;  // (channels,), or nullptr
  T* tail;        // (slots, taps - 1, channels)
  int64_t tail_slot, tail_frame;
  Frames<T> out;  // one head
};

template <typename T>
struct StreamingKernels {
  // The live frames' k and v into their rings, then attention of every frame to `left` frames before its block
  // and to the block. Frames past the live ones: zero.
  void (*window_attention)(const WindowAttention<T>& call, ParallelFor parallel);
  // Of each channel over the `taps` frames that end with its own; then the tails move on by the live frames.
  void (*causal_conv)(const CausalConv<T>& call, ParallelFor parallel);
};

namespace generic {
extern const StreamingKernels<float> streaming_f32;
extern const StreamingKernels<bf16> streaming_bf16;
}  // namespace generic
namespace avx2 {
extern const StreamingKernels<float> streaming_f32;
extern const StreamingKernels<bf16> streaming_bf16;
}  // namespace avx2
namespace avx512 {
extern const StreamingKernels<float> streaming_f32;
extern const StreamingKernels<bf16> streaming_bf16;
}  // namespace avx512

}  // namespace asr_serve
