// Pages of cross-attention keys and values in 8 bits: they are written once and read at every step, at the memory's
// speed. The references are in ../paging.py and ../reference.py.
//
// A page takes the bytes of any other. In those of a layer's K: int8 (heads, head_dim, PAGE), then float scales (heads,
// PAGE), one for each position of a head. In those of its V: int8 (heads, PAGE, head_dim), then scales (heads, PAGE).
#pragma once
#include "kernels.h"

namespace asr_serve {

// T: dtype of the pool, which tells where things lie, and of queries and results.
template <typename T>
struct Int8PageKernels {
  // As Kernels::store.
  void (*store)(Pages pages, const T* kv, int64_t frame_stride, int64_t frames, const int32_t* table, int64_t start);
  // As Kernels::attend, one head of a query for each head of the pages, over all positions.
  void (*attend)(Pages pages, const T* q, int64_t q_stride, T* out, const int32_t* tables, int64_t table_stride,
                 const int64_t* lengths, int64_t rows, float scale, ParallelFor parallel);
};

namespace generic {
extern const Int8PageKernels<float> int8_pages_f32;
extern const Int8PageKernels<bf16> int8_pages_bf16;
}  // namespace generic
namespace avx2 {
extern const Int8PageKernels<float> int8_pages_f32;
extern const Int8PageKernels<bf16> int8_pages_bf16;
}  // namespace avx2
namespace avx512 {
extern const Int8PageKernels<float> int8_pages_f32;
extern const Int8PageKernels<bf16> int8_pages_bf16;
}  // namespace avx512

}  // namespace asr_serve
