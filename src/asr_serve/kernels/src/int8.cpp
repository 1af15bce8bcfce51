// Compiled once per instruction set (see CMakeLists.txt). Weights stay as they are in memory and are widened in
// registers, ROWS rows against BLOCKS blocks of 16 outputs at a time.
#include "int8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "activations.h"
#include "floats.h"
#include "int8_lanes.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

#define ASR_SERVE_INLINE __attribute__((always_inline))

constexpr int VECTORS = INT8_OUTPUTS / LANES;  // in a block of outputs
constexpr int64_t LONGEST_SUM = 512;           // inputs: 512 * 32767 * 127 is just under 2^31
constexpr int64_t ROW_BLOCK = 96;              // rows whose integers stay near while all outputs pass
constexpr int64_t ALONE = 1 << 19;             // products fewer than these are not worth waking threads for

// The largest magnitude. By its bits: a NaN is above all numbers there, and must not be lost.
template <typename T>
float largest(const T* x, int64_t n) {
  uint32_t top = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    float value = load(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    top = std::max(top, bits & 0x7fffffffu);
  }
  float value;
  std::memcpy(&value, &top, 4);
  return value;
}

inline float nearest(float x, float limit) {
  float whole = std::nearbyintf(x);
  whole = whole < -limit ? -limit : whole;
  return whole > limit ? limit : whole;
}

// One row as integers, in the order in which the products read them. A row that is not finite has a scale that is
// not, and so have all its products. `start`: what its sums start from.
template <typename T>
void round_row(const T* x, int64_t in, int bits, bool dots, uint8_t* to, float* scale, int32_t* start) {
  const float limit = bits == 8 ? 127.0f : 32767.0f;
  const float top = largest(x, in);
  const bool usable = top > 1e-30f && top <= 3.4e38f;
  const float inverse = usable ? limit / top : 0.0f;
  *scale = top <= 3.4e38f ? top / limit : NAN;
  const int64_t whole = in / INT8_INPUTS * INT8_INPUTS;
  if (dots && bits == 8) {
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < in; ++i) {
      int32_t whole = int32_t(nearest(usable ? load(x[i]) * inverse : 0.0f, limit));
      to[i] = uint8_t(whole);
      total += whole;
    }
    for (int64_t i = in; i % INT8_INPUTS; ++i) to[i] = 0;
    *start = -OFFSET * total;
    return;
  }
  *start = 0;
  auto* wide = reinterpret_cast<int16_t*>(to);
  auto at = [&](int64_t i) { return int16_t(int32_t(nearest(usable ? load(x[i]) * inverse : 0.0f, limit))); };
  for (int64_t i = 0; i < whole; i += INT8_INPUTS) {  // as even() and odd() leave the weights
    wide[i] = at(i), wide[i + 1] = at(i + 2), wide[i + 2] = at(i + 1), wide[i + 3] = at(i + 3);
  }
  if (whole < in) {
    int16_t rest[INT8_INPUTS] = {};
    for (int64_t i = whole; i < in; ++i) rest[i - whole] = at(i);
    wide[whole] = rest[0], wide[whole + 1] = rest[2], wide[whole + 2] = rest[1], wide[whole + 3] = rest[3];
  }
}

// The same in float for all types of x: nothing is rounded in between.
template <typename T>
void norm_row(const T* x, int64_t in, const RowNorm& norm, float* to) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < in; ++i) {
    to[i] = load(x[i]);
    sum += to[i];
  }
  const float mean = sum / float(in);
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < in; ++i) {
    to[i] -= mean;
    squares += to[i] * to[i];
  }
  const float inverse = 1.0f / std::sqrt(squares / float(in) + norm.eps);
#pragma omp simd
  for (int64_t i = 0; i < in; ++i) to[i] *= inverse * norm.weight[i];
  if (norm.bias)
#pragma omp simd
    for (int64_t i = 0; i < in; ++i) to[i] += norm.bias[i];
}

inline int32_t word(const uint8_t* from) {
  int32_t x;
  std::memcpy(&x, from, 4);
  return x;
}

// each(0), ..., each(N - 1), with constants for indices: arrays that a loop indexes do not stay in registers.
template <int N, typename F>
__attribute__((always_inline)) inline void unrolled(F each) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (each(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// Sums of R rows against B blocks of outputs over `groups` groups of inputs, into sums (R, B * 16) as floats: on top
// of what is there when there is `more`.
template <int R, int B, bool DOTS>
void sums(const int8_t* packed, int64_t block_stride, const uint8_t* x, int64_t x_stride, int64_t groups,
          const int32_t* start, float* into, bool more) {
  constexpr int V = B * VECTORS;
  Lanes sum[R][V], w[V];
  unrolled<R>([&](auto r) ASR_SERVE_INLINE {
    unrolled<V>([&](auto v) ASR_SERVE_INLINE { sum[r][v] = DOTS ? spread(start[r]) : zero(); });
  });
  auto weight = [&](int64_t group, int v) ASR_SERVE_INLINE {
    return load_lanes(packed + (v / VECTORS) * block_stride + group * (INT8_OUTPUTS * INT8_INPUTS) +
                      (v % VECTORS) * LANES * INT8_INPUTS);
  };
  for (int64_t group = 0; group < groups; ++group) {
    if constexpr (DOTS) {
#if ASR_SERVE_DOTS
      unrolled<V>([&](auto v) ASR_SERVE_INLINE { w[v] = lifted(weight(group, v)); });
      unrolled<R>([&](auto r) ASR_SERVE_INLINE {
        Lanes a = spread(word(x + r * x_stride + group * 4));
        unrolled<V>([&](auto v) ASR_SERVE_INLINE { sum[r][v] = dot8(sum[r][v], w[v], a); });
      });
#endif
    } else {
      unrolled<V>([&](auto v) ASR_SERVE_INLINE { w[v] = even(weight(group, v)); });
      unrolled<R>([&](auto r) ASR_SERVE_INLINE {
        Lanes a = spread(word(x + r * x_stride + group * 8));
        unrolled<V>([&](auto v) ASR_SERVE_INLINE { sum[r][v] = dot16(sum[r][v], w[v], a); });
      });
      unrolled<V>([&](auto v) ASR_SERVE_INLINE { w[v] = odd(weight(group, v)); });
      unrolled<R>([&](auto r) ASR_SERVE_INLINE {
        Lanes a = spread(word(x + r * x_stride + group * 8 + 4));
        unrolled<V>([&](auto v) ASR_SERVE_INLINE { sum[r][v] = dot16(sum[r][v], w[v], a); });
      });
    }
  }
  unrolled<R>([&](auto r) ASR_SERVE_INLINE {
    unrolled<V>([&](auto v) ASR_SERVE_INLINE {
      int32_t whole[LANES];
      float* to = into + (r * V + v) * LANES;
      save_lanes(whole, sum[r][v]);
      if (more)
        for (int i = 0; i < LANES; ++i) to[i] += float(whole[i]);
      else
        for (int i = 0; i < LANES; ++i) to[i] = float(whole[i]);
    });
  });
}

using Sums = void (*)(const int8_t*, int64_t, const uint8_t*, int64_t, int64_t, const int32_t*, float*, bool);

template <bool DOTS, int... I>
constexpr std::array<Sums, sizeof...(I)> all_sums(std::integer_sequence<int, I...>) {
  return {sums<I / BLOCKS + 1, I % BLOCKS + 1, DOTS>...};
}
constexpr auto SUMS16 = all_sums<false>(std::make_integer_sequence<int, ROWS * BLOCKS>{});
constexpr auto SUMS8 = all_sums<true>(std::make_integer_sequence<int, ROWS * BLOCKS>{});

// act(sum * scales + bias) + add for `n` outputs of one row, at most INT8_OUTPUTS.
template <bool GELU, typename T, typename Out>
ASR_SERVE_INLINE inline void finish_block(const float* sum, float row_scale, const float* scale, const float* bias,
                                          const T* add, Out* out, int64_t n) {
  float y[INT8_OUTPUTS];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = sum[i] * (row_scale * scale[i]);
  if (bias)
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
  if (GELU)
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = gelu(y[i]);
  if (add)
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += load(add[i]);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) save(out + i, y[i]);
}

// The same for any number of outputs: whole blocks in loops whose length the compiler knows.
template <bool GELU, typename T, typename Out>
void finish(const Int8Product& p, const float* sum, float row_scale, int64_t row, int64_t first, int64_t n) {
  const float *scale = p.weights.scale + first, *bias = p.weights.bias ? p.weights.bias + first : nullptr;
  const int64_t at = row * p.weights.out + first;
  const T* add = p.add ? static_cast<const T*>(p.add) + at : nullptr;
  Out* out = static_cast<Out*>(p.out) + at;
  int64_t i = 0;
  auto block = [&](int64_t count) ASR_SERVE_INLINE {
    finish_block<GELU>(sum + i, row_scale, scale + i, bias ? bias + i : nullptr, add ? add + i : nullptr, out + i, count);
  };
  for (; i + INT8_OUTPUTS <= n; i += INT8_OUTPUTS) block(INT8_OUTPUTS);
  if (i < n) block(n - i);
}

template <typename T, typename Out>
void typed(const Int8Product& p, ParallelFor parallel) {
  const Int8Weights& w = p.weights;
  const bool dots = ASR_SERVE_DOTS && p.bits == 8;
  const int64_t groups = (w.in + INT8_INPUTS - 1) / INT8_INPUTS, blocks = (w.out + INT8_OUTPUTS - 1) / INT8_OUTPUTS;
  const int64_t stride = groups * INT8_INPUTS * (dots ? 1 : 2), block_stride = groups * INT8_OUTPUTS * INT8_INPUTS;
  thread_local std::vector<uint8_t> integers;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> starts;
  integers.resize(size_t(p.rows * stride));
  scales.resize(size_t(p.rows));
  starts.resize(size_t(p.rows));
  uint8_t* rounded = integers.data();  // of this thread: the others must not look for theirs
  float* row_scale = scales.data();
  int32_t* row_start = starts.data();
  const bool alone = p.rows * w.in * w.out < ALONE;
  auto spread_out = [&](int64_t items, auto& each) {
    if (alone)
      for (int64_t item = 0; item < items; ++item) each(item);
    else
      run(items, parallel, each);
  };
  auto round = [&](int64_t item) {
    const int64_t end = std::min(p.rows, (item + 1) * ROW_BLOCK);
    thread_local std::vector<float> normed;
    if (w.norm.weight && normed.size() < size_t(w.in)) normed.resize(size_t(w.in));
    for (int64_t row = item * ROW_BLOCK; row < end; ++row) {
      const T* x = static_cast<const T*>(p.x) + row * w.in;
      auto round_numbers = [&](const auto* numbers) {
        round_row(numbers, w.in, p.bits, dots, rounded + row * stride, row_scale + row, row_start + row);
      };
      if (!w.norm.weight) {
        round_numbers(x);
        continue;
      }
      norm_row(x, w.in, w.norm, normed.data());
      round_numbers(normed.data());
    }
  };
  const int64_t row_blocks = (p.rows + ROW_BLOCK - 1) / ROW_BLOCK;
  spread_out(row_blocks, round);

  // As many blocks at a time as come out even.
  int64_t width = BLOCKS;
  while (width > 2 && blocks % width) --width;
  if (blocks % width) width = BLOCKS;
  const int64_t panels = (blocks + width - 1) / width;
  const auto done = p.gelu ? finish<true, T, Out> : finish<false, T, Out>;
  auto one = [&](int64_t item) {
    const int64_t panel = item % panels, first_block = panel * width, n = std::min(width, blocks - first_block);
    const int64_t first = first_block * INT8_OUTPUTS, outputs = std::min(n * INT8_OUTPUTS, w.out - first);
    const int64_t end = std::min(p.rows, (item / panels + 1) * ROW_BLOCK);
    const int8_t* packed = w.packed + first_block * block_stride;
    for (int64_t row = item / panels * ROW_BLOCK; row < end;) {
      const int64_t count = std::min<int64_t>(ROWS, end - row);
      const auto& table = dots ? SUMS8 : SUMS16;
      const Sums call = table[size_t((count - 1) * BLOCKS + n - 1)];
      float sum[ROWS * BLOCKS * INT8_OUTPUTS];
      const uint8_t* x = rounded + row * stride;
      if (dots) {
        call(packed, block_stride, x, stride, groups, row_start + row, sum, false);
      } else {
        constexpr int64_t STEP = LONGEST_SUM / INT8_INPUTS;
        for (int64_t g = 0; g < groups; g += STEP)
          call(packed + g * INT8_OUTPUTS * INT8_INPUTS, block_stride, x + g * INT8_INPUTS * 2, stride,
               std::min(STEP, groups - g), nullptr, sum, g > 0);
      }
      for (int64_t r = 0; r < count; ++r)
        done(p, sum + r * n * INT8_OUTPUTS, row_scale[row + r], row + r, first, outputs);
      row += count;
    }
  };
  spread_out(row_blocks * panels, one);
}

void product(const Int8Product& p, ParallelFor parallel) {
  if (p.x_bf16 && p.out_bf16)
    typed<bf16, bf16>(p, parallel);
  else if (p.x_bf16)
    typed<bf16, float>(p, parallel);
  else
    typed<float, float>(p, parallel);
}

}  // namespace

#define ASR_SERVE_TEXT_(x) #x
#define ASR_SERVE_TEXT(x) ASR_SERVE_TEXT_(x)
extern const Int8Kernels int8 = {ASR_SERVE_TEXT(ASR_SERVE_ISA), bool(ASR_SERVE_DOTS), product};

}  // namespace asr_serve::ASR_SERVE_ISA
