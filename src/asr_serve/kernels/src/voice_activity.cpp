#include "voice_activity.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <vector>

#include "floats.h"
#include "vectors.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

// Windows of an item: all its activations stay in the second cache.
constexpr int64_t BLOCK = 12;
// Windows and vectors of outputs whose sums are in registers at once.
constexpr int64_t TILE = 6;
constexpr int VECTORS = LANES == 16 ? 4 : 2;
constexpr int64_t FFT = 256, HOP = 128, FRAMES = 4, HALF = 64, SPECTRUM = 132;

// One term of a sum of products: x (windows, inner), as far apart as all of them, times weight (inner, outputs).
struct Term {
  const float* x;
  const float* weight;
  int64_t inner;
};

// out[r] = sum of x[r] weight over the terms, and bias, for BLOCK windows; those below `rows` are stored. A window's sums
// are added up in the same order wherever it stands in a block.
void product(const Term* terms, int count, int64_t x_stride, const float* bias, float* out, int64_t out_stride,
             int64_t outputs, int64_t rows, bool relu) {
  for (int64_t j = 0; j < outputs; j += VECTORS * LANES)
    for (int64_t first = 0; first < rows; first += TILE) {
      Vec sums[TILE][VECTORS];
#pragma GCC unroll 8
      for (int64_t r = 0; r < TILE; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = bias ? load_vec(bias + j + v * LANES) : Vec{};
      for (int t = 0; t < count; ++t) {
        const float* x = terms[t].x + first * x_stride;
        const float* weight = terms[t].weight + j;
        for (int64_t k = 0; k < terms[t].inner; ++k, weight += outputs) {
          Vec w[VECTORS];
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) w[v] = load_vec(weight + v * LANES);
#pragma GCC unroll 8
          for (int64_t r = 0; r < TILE; ++r) {
            const float value = x[r * x_stride + k];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += value * w[v];
          }
        }
      }
      for (int64_t r = 0; r < std::min(TILE, rows - first); ++r)
        for (int v = 0; v < VECTORS; ++v) {
          Vec sum = sums[r][v];
          if (relu) sum = sum < 0 ? Vec{} : sum;
          std::memcpy(out + (first + r) * out_stride + j + v * LANES, &sum, sizeof(sum));
        }
    }
}

// Cosines and sines of the bins below 128, by halves of the frequencies: a spectrum of 256 samples is four products of 64,
// for cosines and sines are even or odd about samples 64 and 128.
struct Transform {
  float hann[FFT];
  // (samples, bins): even bins of a[n] + a[128 - n], with n = 64 as the last; odd bins of a[n] - a[128 - n].
  float even_cos[(HALF + 1) * HALF], odd_cos[HALF * HALF];
  // (samples - 1, bins): even bins of b[n] - b[128 - n]; odd bins of b[n] + b[128 - n], with n = 64 as the last.
  float even_sin[(HALF - 1) * HALF], odd_sin[HALF * HALF];

  Transform() {
    const double turn = 2 * std::numbers::pi / FFT;
    for (int64_t n = 0; n < FFT; ++n) hann[n] = float(0.5 - 0.5 * std::cos(turn * double(n)));
    for (int64_t n = 0; n <= HALF; ++n)
      for (int64_t m = 0; m < HALF; ++m) {
        const double even = turn * double(2 * m * n % FFT), odd = turn * double((2 * m + 1) * n % FFT);
        even_cos[n * HALF + m] = float(std::cos(even));
        if (n < HALF) odd_cos[n * HALF + m] = float(std::cos(odd));
        if (n > 0 && n < HALF) even_sin[(n - 1) * HALF + m] = float(std::sin(even));
        if (n > 0) odd_sin[(n - 1) * HALF + m] = float(std::sin(odd));
      }
  }
};

const Transform& transform() {
  static const Transform made;
  return made;
}

// Activations of a block; each layer has the same frame of all windows side by side. What lies past a block's windows is
// of earlier ones, and is computed but not stored.
struct Scratch {
  float samples[FFT];
  float even_cos[BLOCK * 72], odd_cos[BLOCK * 72], even_sin[BLOCK * 72], odd_sin[BLOCK * 72];
  float parts[4][BLOCK * HALF];
  float spectrum[FRAMES][BLOCK * SPECTRUM];
  float layers[VAD_CONVS][FRAMES][BLOCK * 128];
  float gates[BLOCK * VAD_OUTPUTS];
};

// The frame of window `row` from 256 samples: sums and differences of samples that a bin's wave weighs alike.
void fold(const float* x, const Transform& made, Scratch& s, int64_t row) {
  float a[HOP + 1], b[HOP + 1];
  a[0] = b[0] = 0, a[HOP] = x[HOP], b[HOP] = 0;  // the Hann window is 0 and 1 there
  for (int64_t n = 1; n < HOP; ++n) {
    a[n] = made.hann[n] * (x[n] + x[FFT - n]);
    b[n] = made.hann[n] * (x[n] - x[FFT - n]);
  }
  float *even_cos = s.even_cos + row * 72, *odd_cos = s.odd_cos + row * 72, *even_sin = s.even_sin + row * 72,
        *odd_sin = s.odd_sin + row * 72;
  for (int64_t n = 0; n < HALF; ++n) even_cos[n] = a[n] + a[HOP - n], odd_cos[n] = a[n] - a[HOP - n];
  even_cos[HALF] = a[HALF];
  for (int64_t n = 1; n < HALF; ++n) even_sin[n - 1] = b[n] - b[HOP - n], odd_sin[n - 1] = b[n] + b[HOP - n];
  odd_sin[HALF - 1] = b[HALF];
}

// Magnitudes of the bins of one frame of all windows.
void magnitudes(const Transform& made, Scratch& s, float* out, int64_t rows) {
  const Term terms[] = {{s.even_cos, made.even_cos, HALF + 1},
                        {s.odd_cos, made.odd_cos, HALF},
                        {s.even_sin, made.even_sin, HALF - 1},
                        {s.odd_sin, made.odd_sin, HALF}};
  for (int part = 0; part < 4; ++part)
    product(terms + part, 1, 72, nullptr, s.parts[part], HALF, HALF, rows, false);
  for (int64_t row = 0; row < rows; ++row) {
    const float *even_re = s.parts[0] + row * HALF, *odd_re = s.parts[1] + row * HALF, *even_im = s.parts[2] + row * HALF,
                *odd_im = s.parts[3] + row * HALF, *folded = s.even_cos + row * 72;
    float* bins = out + row * SPECTRUM;
    float even[HALF], odd[HALF], last = 0;
    for (int64_t m = 0; m < HALF; ++m) even[m] = std::sqrt(even_re[m] * even_re[m] + even_im[m] * even_im[m]);
    for (int64_t m = 0; m < HALF; ++m) odd[m] = std::sqrt(odd_re[m] * odd_re[m] + odd_im[m] * odd_im[m]);
    for (int64_t m = 0; m < HALF; ++m) bins[2 * m] = even[m], bins[2 * m + 1] = odd[m];
    for (int64_t n = 0; n <= HALF; ++n) last += n % 2 ? -folded[n] : folded[n];
    bins[2 * HALF] = std::fabs(last);
  }
}

// Gate inputs of `windows` windows, BLOCK at most: those from `window` of row `row`, then of the rows after it.
void encode_block(const VadWeights& weights, const VadCall& call, int64_t row, int64_t window, int64_t windows) {
  // A pointer: every thread of the process has room for thread_local objects, though few threads call this.
  thread_local std::unique_ptr<Scratch> scratch;
  if (!scratch) scratch = std::make_unique<Scratch>();
  Scratch& s = *scratch;
  const Transform& made = transform();
  int64_t steps[BLOCK];
  const float* starts[BLOCK];
  const float* contexts[BLOCK];
  for (int64_t i = 0; i < windows; ++i, ++window) {
    while (window == call.counts[row]) ++row, window = 0;
    steps[i] = call.offsets[row] + window;
    starts[i] = call.pcm + row * call.samples + window * VAD_WINDOW;
    contexts[i] = window ? starts[i] - VAD_CONTEXT : call.context + row * VAD_CONTEXT;
  }
  for (int64_t frame = 0; frame < FRAMES; ++frame) {
    for (int64_t i = 0; i < windows; ++i) {
      const float* x = starts[i] + frame * HOP - VAD_CONTEXT;
      if (frame == 0) {
        std::memcpy(s.samples, contexts[i], VAD_CONTEXT * sizeof(float));
        std::memcpy(s.samples + VAD_CONTEXT, starts[i], (FFT - VAD_CONTEXT) * sizeof(float));
        x = s.samples;
      } else if (frame == FRAMES - 1) {  // past the window its own end is mirrored; the last sample is not repeated
        std::memcpy(s.samples, x, (FFT - VAD_CONTEXT) * sizeof(float));
        for (int64_t n = 0; n < VAD_CONTEXT; ++n) s.samples[FFT - VAD_CONTEXT + n] = starts[i][VAD_WINDOW - 2 - n];
        x = s.samples;
      }
      fold(x, made, s, i);
    }
    magnitudes(made, s, s.spectrum[frame], windows);
  }
  int64_t frames = FRAMES, stride = SPECTRUM;
  for (int64_t conv = 0; conv < VAD_CONVS; ++conv) {
    const int64_t step = VAD_STRIDES[conv], inputs = VAD_CHANNELS[conv], outputs = VAD_CHANNELS[conv + 1];
    const int64_t made_frames = (frames - 1) / step + 1;
    for (int64_t frame = 0; frame < made_frames; ++frame) {
      Term terms[3];
      int count = 0;
      for (int64_t tap = 0; tap < 3; ++tap) {
        const int64_t from = frame * step + tap - 1;
        if (from < 0 || from >= frames) continue;  // zeros
        terms[count++] = {conv ? s.layers[conv - 1][from] : s.spectrum[from],
                          weights.convs[size_t(conv)].weight.data() + tap * inputs * outputs, inputs};
      }
      product(terms, count, stride, weights.convs[size_t(conv)].bias.data(), s.layers[conv][frame], outputs, outputs,
              windows, true);
    }
    frames = made_frames, stride = outputs;
  }
  const int64_t width = VAD_CHANNELS[VAD_CONVS];
  const Term last{s.layers[VAD_CONVS - 1][0], weights.gate_weight.data(), width};
  product(&last, 1, width, weights.gate_bias.data(), s.gates, VAD_OUTPUTS, VAD_OUTPUTS, windows, false);
  for (int64_t i = 0; i < windows; ++i)
    std::memcpy(call.gates + steps[i] * VAD_OUTPUTS, s.gates + i * VAD_OUTPUTS, VAD_OUTPUTS * sizeof(float));
}

void encode(const VadWeights& weights, const VadCall& call, ParallelFor parallel) {
  struct Block {
    int64_t row, window, windows;
  };
  std::vector<Block> blocks;
  int64_t filled = BLOCK;
  for (int64_t row = 0; row < call.rows; ++row)
    for (int64_t window = 0; window < call.counts[row];) {
      if (filled == BLOCK) blocks.push_back({row, window, 0}), filled = 0;
      const int64_t taken = std::min(BLOCK - filled, call.counts[row] - window);
      blocks.back().windows += taken, filled += taken, window += taken;
    }
  auto one = [&](int64_t item) {
    const Block& block = blocks[size_t(item)];
    encode_block(weights, call, block.row, block.window, block.windows);
  };
  run(int64_t(blocks.size()), parallel, one);
}

}  // namespace

extern const VadEncode vad_encode = encode;

}  // namespace asr_serve::ASR_SERVE_ISA
