// Layers of an encoder-decoder model's decoder over the positions of a pass, in one call: self-attention,
// cross-attention and feed-forward, each after a layer norm and with a residual. The same as tensor operations, which is
// its oracle, stands in the models' own layers (asr_serve/models/asr: moonshine, whisper).
#pragma once
#include <vector>

#include "bf16.h"
#include "decoder.h"
#include "int8.h"
#include "int8_pages.h"
#include "kernels.h"

namespace asr_serve {

// A linear layer over 8-bit or over bf16 weights.
struct DecoderProduct {
  Int8Weights int8;
  int bits;  // of a row's integers: 8 or 16; 0: the weights are bf16
  Bf16Product bf16;
  MultiplyBf16 multiply;
  int64_t inputs, outputs;
};

struct DecoderNorm {
  const float *weight, *bias;  // bias may be nullptr
};

struct DecoderLayer {
  DecoderNorm own_norm, cross_norm, feed_norm;
  DecoderProduct qkv, own_out, query, cross_out, up, down;
};

// What was compiled for the instruction set in use.
template <typename T>
struct DecoderLayerKernels {
  const Kernels<T>& numbers;
  const DecoderKernels<T>& rows;
  const Int8PageKernels<T>& int8_pages;
  const Int8Kernels& int8;
};

// Sizes of the layers, and what one pass through them reads beside x.
struct DecoderInputs {
  const std::vector<DecoderLayer>* layers;
  int64_t rows, width;
  int heads, head_dim;
  float scale, eps;
  const float *cos, *sin;  // (positions, half) of the rotation of queries and keys; nullptr: there is none
  int half;
  bool gated;  // the up product is a counterpart, then a gate for silu; else gelu follows it
  Pages own, audio;  // of layer 0
  int64_t own_layer_stride, audio_layer_stride;
  bool int8_audio;   // pages of audio hold 8 bits
  const int32_t *own_tables, *audio_tables;
  int64_t own_table_stride, audio_table_stride;
  const int64_t *own_lengths, *audio_lengths;  // (rows,) filled positions; the last of a row's own is this one
};

// x (rows, width) through all layers, in place. queries[i]: where the cross-attention queries (rows, heads * head_dim) of
// layer i go, or nullptr. `threads`: how many `parallel` runs on. A row is the same in any company.
template <typename T>
void run_decoder_layers(const DecoderInputs& inputs, const DecoderLayerKernels<T>& kernels, T* x,
                        const std::vector<T*>& queries, unsigned threads, ParallelFor parallel);

}  // namespace asr_serve
