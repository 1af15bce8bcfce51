// What decoder layers compute beside their products. ../decoder_reference.py has the reference of every function that
// Python calls; layer norms and GELU are called by decoder_layers.cpp, whose oracle the models' own layers are.
#pragma once
#include "activations.h"
#include "kernels.h"

namespace asr_serve {

// Queries of some rows of a pass, and where their keys and values lie.
struct GroupedAttention {
  Pages pages;
  int64_t rows;
  int group;              // heads of the query for each head of the pages, side by side
  int64_t q_stride;       // numbers from one query to the next
  const int32_t* tables;  // (rows, table_stride)
  int64_t table_stride;
  const int64_t* lengths;
  int64_t window;  // only the last so many positions are attended to; 0: all
  float scale;
};

struct Rotation {
  int heads, kv_heads, head_dim;
  const float* norms;  // (heads + kv_heads, head_dim), or nullptr
  float eps;
  const float *cos, *sin;  // (positions, head_dim / 2)
  const int64_t* positions;
};

template <typename T>
struct DecoderKernels {
  // out = x / rms(x) * weight over rows of `width` numbers.
  void (*rms_norm)(const T* x, const float* weight, T* out, int64_t rows, int64_t width, float eps,
                   ParallelFor parallel);
  // qkv (rows, (heads + 2 * kv_heads) * head_dim): normalizes and rotates queries, in place, and keys, which go into the
  // row's page with the values.
  void (*rotate_append)(T* qkv, int64_t rows, const Rotation& rotation, Pages pages, const int32_t* tables,
                        int64_t table_stride, ParallelFor parallel);
  // out = (x - mean(x)) / deviation(x) * weight + bias over rows of `width` numbers; bias may be nullptr.
  void (*layer_norm)(const T* x, const float* weight, const float* bias, T* out, int64_t rows, int64_t width, float eps,
                     ParallelFor parallel);
  // out (rows, width) = act(gate) * up, whose rows are `stride` numbers apart.
  void (*gate)(const T* gate, const T* up, int64_t stride, T* out, int64_t rows, int64_t width, Activation activation,
               ParallelFor parallel);
  // x (rows, width) = gelu(x), the exact one, in place.
  void (*gelu)(T* x, int64_t rows, int64_t width, ParallelFor parallel);
  // Like Kernels::attend, for queries that share heads of keys; the result of a row is the same in any company.
  void (*attend_grouped)(const GroupedAttention& call, const T* q, T* out, ParallelFor parallel);
};

namespace generic {
extern const DecoderKernels<float> decoder_f32;
extern const DecoderKernels<bf16> decoder_bf16;
}  // namespace generic
namespace avx2 {
extern const DecoderKernels<float> decoder_f32;
extern const DecoderKernels<bf16> decoder_bf16;
}  // namespace avx2
namespace avx512 {
extern const DecoderKernels<float> decoder_f32;
extern const DecoderKernels<bf16> decoder_bf16;
}  // namespace avx512

}  // namespace asr_serve
