// Frames of many sessions through a compiled list of layers. The same in torch, which is its oracle, stands in
// asr_serve/models/asr/kaldi_chain/network.py; the places of the frames are computed there.
#pragma once
#include <vector>

#include "kernels.h"
#include "tiles.h"

namespace asr_serve {

constexpr int LAYER_OUTPUTS = 16;  // a weight is packed as (outputs / 16, inputs, 16), padded with zeros

// Frames of a source: those up to `lag` before its newest, every `step`-th. Source 0 is the input, i + 1 layer i.
struct LayerRead {
  int64_t source, lag, step;
};

struct Layer {
  int64_t width, stride, ahead, history;
  int64_t state;  // where its history begins in a session's state
  bool relu, ivector, primed, rounded, tiled;  // the weight is bf16; it is packed for tiles
  std::vector<LayerRead> reads;
  std::vector<float> scales;  // of a weighted sum; none: a matrix
  const void* weight;
  const float* bias;
  int64_t last_reader;  // the last layer that reads it
};

struct LayersCall {
  const std::vector<Layer>* layers;
  int64_t sessions, block_frames, input_history, input_width, ivector_width, subsampling, state_width;
  const float *frames, *before, *after;
  void* state;        // (sessions, state_width), float or bf16
  bool state_rounded;
  bool prime;   // only the layers that the state needs
  void* out;    // (frames, sessions, width) of the last layer, in the state's dtype; nullptr when priming
  TileMultiply tiles;  // where weights are packed for tiles, else nullptr
};

using RunLayers = void (*)(const LayersCall& call, ParallelFor parallel);

namespace generic {
extern const RunLayers run_layers;
}
namespace avx2 {
extern const RunLayers run_layers;
}
namespace avx512 {
extern const RunLayers run_layers;
}

}  // namespace asr_serve
