// What the native core computes. ../reference.py has the reference of every function.
//
// Pointers are to contiguous row-major arrays. T is float or bf16. A page holds PAGE positions of every
// layer: page -> layer -> {K, V}; K is (heads, head_dim, PAGE) so that scores of PAGE positions are one
// vector, V is (heads, PAGE, head_dim) so that their weighted sum is.
#pragma once
#include <cstdint>

namespace asr_serve {

constexpr int PAGE = 16;

struct bf16 {
  uint16_t bits;
};

// The shape of one paged store, in elements.
struct Pages {
  void* data;
  int64_t page_stride;   // elements between two pages
  int64_t layer_offset;  // elements from the start of a page to this layer's K
  int heads;
  int head_dim;
};

// Runs body(item) for item in [0, items), on the threads torch already has.
using Body = void (*)(void* context, int64_t item);
using ParallelFor = void (*)(int64_t items, Body body, void* context);

template <typename T>
struct Kernels {
  // In place on qkv (rows, 3, heads, head_dim): rotates the first 2*half dimensions of q and k, halves
  // apart, by the angles of row's position. cos, sin: (positions, half).
  void (*rope)(T* qkv, const int64_t* positions, const float* cos, const float* sin, int64_t rows, int heads,
               int head_dim, int half, ParallelFor parallel);
  // In place on scores (batch, heads, queries, keys): softmax(scale * x) over the first lengths[batch] keys,
  // zero beyond.
  void (*softmax)(T* scores, const int64_t* lengths, int64_t batch, int64_t inner, int64_t keys, float scale,
                  ParallelFor parallel);
  // K and V of frame i of a sequence into position start + i of its pages.
  // kv: (frames, 2, heads * head_dim) with frame_stride elements between frames.
  void (*store)(Pages pages, const T* kv, int64_t frame_stride, int64_t frames, const int32_t* table,
                int64_t start);
  // One query each: out[r] = softmax(scale * q[r] K^T) V over the first lengths[r] positions of table r, or the last
  // `window` of these if window is not 0. A query has `group` heads for each head of the pages, side by side.
  void (*attend)(Pages pages, const T* q, int64_t q_stride, T* out, const int32_t* tables, int64_t table_stride,
                 const int64_t* lengths, int64_t rows, int group, int64_t window, float scale, ParallelFor parallel);
  // tokens[r] = argmax of logits[r], near ties decided by the float32 product hidden[r] . weight[token];
  // logprobs[r] = log softmax of it.
  void (*pick)(const T* logits, const T* hidden, const T* weight, int64_t rows, int64_t vocab, int dim,
               int64_t* tokens, float* logprobs, ParallelFor parallel);
  // x = tanh(x) in place, then out = (x - mean) / sqrt(variance + eps) over all items.
  void (*tanh_norm)(float* x, T* out, int64_t items, float eps, ParallelFor parallel);
};

// One LSTM layer over sequences laid end to end: row r takes lengths[r] steps from step offsets[r]. gates (steps,
// 4 * width) hold the input's part, biases included, in the order i f g o; weight (width, 4 * width) is the
// recurrent matrix transposed; h, c (rows, width) are updated in place; out (steps, width).
using Lstm = void (*)(const float* gates, const float* weight, const int64_t* offsets, const int64_t* lengths, float* h,
                      float* c, float* out, int64_t rows, int width, ParallelFor parallel);

namespace generic {
extern const Lstm lstm_f32;
extern const Kernels<float> kernels_f32;
extern const Kernels<bf16> kernels_bf16;
}  // namespace generic
namespace avx2 {
extern const Lstm lstm_f32;
extern const Kernels<float> kernels_f32;
extern const Kernels<bf16> kernels_bf16;
}  // namespace avx2
namespace avx512 {
extern const Lstm lstm_f32;
extern const Kernels<float> kernels_f32;
extern const Kernels<bf16> kernels_bf16;
}  // namespace avx512

}  // namespace asr_serve
