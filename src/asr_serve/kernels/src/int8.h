// Products with weights of 8 bits. The reference is ../int8_reference.py.
//
// y = act(x W^T + b) + add, W (out, in) as int8 with one float scale for each output. Each row of x is rounded to
// integers by a scale of its own, of 16 bits (weight-only quantisation: finer than bf16 for all that counts in the
// row) or of 8 (dynamic quantisation), and the sums are whole numbers: the same in any order, so that a row is the
// same in any company, on any number of threads and on any instruction set up to the last float operations.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace asr_serve {

// Outputs that lie together, and inputs of one output that do: a group is one vector of 512 bits.
constexpr int INT8_OUTPUTS = 16, INT8_INPUTS = 4;

// Norm of a row before it is rounded: its mean taken off, over its standard deviation, times weight, plus bias.
struct RowNorm {
  const float* weight = nullptr;  // (in,); nullptr: there is no norm
  const float* bias = nullptr;    // (in,) or nullptr
  float eps = 0;
};

struct Int8Weights {
  const int8_t* packed;  // (out blocks of 16, in blocks of 4, 16, 4), both ends filled up with zeros
  const float* scale;    // (out,)
  const float* bias;     // (out,) or nullptr
  int64_t in, out;
  RowNorm norm = {};
};

struct Int8Product {
  Int8Weights weights;
  const void* x;    // (rows, in)
  void* out;        // (rows, out)
  const void* add;  // (rows, out), of the dtype of x, or nullptr
  bool x_bf16, out_bf16;
  int64_t rows;
  int bits;  // of a row's integers: 16 or 8
  bool gelu;
};

struct Int8Kernels {
  const char* name;
  bool dots;  // whether 8-bit products have instructions of their own here
  void (*product)(const Int8Product& product, ParallelFor parallel);
};

namespace generic {
extern const Int8Kernels int8;
}
namespace avx2 {
extern const Int8Kernels int8;
}
namespace avx_vnni {
extern const Int8Kernels int8;
}
namespace avx512 {
extern const Int8Kernels int8;
}
namespace avx512_vnni {
extern const Int8Kernels int8;
}
namespace neon {
extern const Int8Kernels int8;
}
namespace neon_dot {
extern const Int8Kernels int8;
}

}  // namespace asr_serve
