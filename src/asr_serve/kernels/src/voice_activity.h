// The part of Silero's voice activity before its LSTM: everything that does not depend on the windows before, but for
// the last samples of the one before. ../voice_activity_reference.py has the reference.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace asr_serve {

constexpr int64_t VAD_WINDOW = 512, VAD_CONTEXT = 64, VAD_BINS = 129, VAD_CONVS = 4;
constexpr int64_t VAD_CHANNELS[VAD_CONVS + 1] = {VAD_BINS, 128, 64, 64, 128};
constexpr int64_t VAD_STRIDES[VAD_CONVS] = {1, 2, 2, 1};
constexpr int64_t VAD_OUTPUTS = 512;  // gate inputs of the LSTM

struct VadConv {
  std::vector<float> weight;  // (3 taps, channels in, channels out)
  std::vector<float> bias;
};

struct VadWeights {
  std::array<VadConv, VAD_CONVS> convs;
  std::vector<float> gate_weight;  // (128, 512)
  std::vector<float> gate_bias;
};

// Row r has counts[r] windows of pcm (rows, samples), after context (rows, 64), its samples before them. Those of window
// w go to gates (steps, 512) at step offsets[r] + w.
struct VadCall {
  const float* pcm;
  const float* context;
  const int64_t* counts;
  const int64_t* offsets;
  float* gates;
  int64_t rows;
  int64_t samples;
};

using VadEncode = void (*)(const VadWeights& weights, const VadCall& call, ParallelFor parallel);

namespace generic {
extern const VadEncode vad_encode;
}  // namespace generic
namespace avx2 {
extern const VadEncode vad_encode;
}  // namespace avx2
namespace avx512 {
extern const VadEncode vad_encode;
}  // namespace avx512

}  // namespace asr_serve
