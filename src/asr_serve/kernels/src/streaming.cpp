// Compiled once per instruction set (see CMakeLists.txt). What a result is the sum of, and in which order, depends
// on nothing but the session: not on its neighbours, nor on how long its chunks are.
#include "streaming.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "floats.h"
#include "vectors.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

// How many registers of numbers a session's values are taken by at a time: with four queries they all fit.
constexpr int BREADTH = LANES == 4 ? 1 : LANES / 4;
constexpr int QUERIES = 4;

typedef int32_t Lanes __attribute__((vector_size(LANES * 4)));

// `count` of them, fewer than LANES, and zeros.
template <typename T>
inline Vec load_part(const T* from, int64_t count) {
  float x[LANES] = {};
  for (int64_t i = 0; i < count; ++i) x[i] = load(from[i]);
  return load_vec(x);
}
// As many of `count` as there are lanes.
template <typename T>
inline void save_some(T* to, Vec x, int64_t count) {
  float each[LANES];
  std::memcpy(each, &x, sizeof(x));
  if (count >= LANES)
#pragma omp simd
    for (int i = 0; i < LANES; ++i) save(to + i, each[i]);
  else
    for (int64_t i = 0; i < count; ++i) save(to + i, each[i]);
}

// Of two vectors cut into segments, every segment's lower (Upper 0) or upper (1) half, by turns.
template <int SEGMENT, int UPPER, size_t... I>
inline Vec halves(Vec a, Vec b, std::index_sequence<I...>) {
  constexpr auto source = [](int lane) {
    int within = lane % SEGMENT, start = lane - within + UPPER * (SEGMENT / 2);
    return within < SEGMENT / 2 ? start + within : LANES + start + within - SEGMENT / 2;
  };
#if defined(__clang__)
  return __builtin_shufflevector(a, b, source(I)...);
#else
  return __builtin_shuffle(a, b, Lanes{source(I)...});
#endif
}

// LANES vectors become one, in v[0]: lane i of it is the sum over all lanes of v[i].
template <int SEGMENT = LANES>
inline void add_lanes(Vec* v) {
  if constexpr (SEGMENT > 1) {
    constexpr auto all = std::make_index_sequence<LANES>();
#pragma GCC unroll 8
    for (int i = 0; i < SEGMENT / 2; ++i) {
      Vec a = v[i], b = v[i + SEGMENT / 2];
      v[i] = halves<SEGMENT, 0>(a, b, all) + halves<SEGMENT, 1>(a, b, all);
    }
    add_lanes<SEGMENT / 2>(v);
  }
}

// The frames of one session and head from some frame on, oldest first.
template <typename T>
struct Past {
  const T* data;
  int64_t capacity, stride, start;

  const T* operator[](int64_t i) const {
    int64_t at = start + i;
    return data + (at < capacity ? at : at - capacity) * stride;
  }
};

// Ask for what is read next: it lies where the processor's own prefetcher does not look.
inline void expect(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// scores[q * stride + t] = query q . key t, for Q queries of `dim` numbers, each padded with zeros to a whole number
// of vectors. Scores are written up to LANES past the last key. `next` is read after the keys, if it has data.
template <typename T, int Q>
void score(const float* query, const Past<T>& keys, const Past<T>& next, int64_t count, int64_t dim, float* scores,
           int64_t stride) {
  constexpr int KEYS = LANES / Q;
  const int64_t padded = (dim + LANES - 1) / LANES * LANES, whole = dim / LANES * LANES;
  for (int64_t t = 0; t < count; t += KEYS) {
    const T* at[KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < KEYS; ++i) at[i] = keys[std::min(t + i, count - 1)];
    if (next.data)
      for (int64_t i = t; i < std::min(t + KEYS, count); ++i) expect(next[i], dim * int64_t(sizeof(T)));
    Vec sum[LANES] = {};
    auto add = [&](int64_t d, auto key_of) {
      Vec x[Q];
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) x[q] = load_vec(query + q * padded + d);
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; ++i) {
        Vec key = key_of(i);
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) sum[q * KEYS + i] += x[q] * key;
      }
    };
    for (int64_t d = 0; d < whole; d += LANES) add(d, [&](int i) { return load_vec(at[i] + d); });
    if (whole < dim) {
      Vec rest[KEYS];
      for (int i = 0; i < KEYS; ++i) rest[i] = load_part(at[i] + whole, dim - whole);
      add(whole, [&](int i) { return rest[i]; });
    }
    add_lanes(sum);
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
      std::memcpy(scores + q * stride + t, reinterpret_cast<const float*>(sum) + q * KEYS, KEYS * sizeof(float));
  }
}

// softmax(scale * (scores + bias)) in place, bias unless it is nullptr. Scores are written up to LANES past the last.
template <typename B>
void weigh(float* scores, int64_t count, const B* bias, int64_t stride, float scale) {
  if (bias && stride == 1)
#pragma omp simd
    for (int64_t t = 0; t < count; ++t) scores[t] += load(bias[t]);
  else if (bias)
    for (int64_t t = 0; t < count; ++t) scores[t] += load(bias[t * stride]);
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  std::fill(scores + count, scores + padded, -INFINITY);
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t t = 0; t < padded; ++t) top = std::max(top, scores[t]);
  Vec sum = {};
  for (int64_t t = 0; t < padded; t += LANES) {
    float part[LANES];
#pragma omp simd
    for (int i = 0; i < LANES; ++i) part[i] = exp_negative((scores[t + i] - top) * scale);
    std::memcpy(scores + t, part, sizeof(part));
    sum += load_vec(part);
  }
  float total[LANES];
  std::memcpy(total, &sum, sizeof(sum));
  for (int rest = LANES / 2; rest; rest /= 2)
    for (int i = 0; i < rest; ++i) total[i] += total[i + rest];
  const float inverse = 1.0f / total[0];
#pragma omp simd
  for (int64_t t = 0; t < padded; ++t) scores[t] *= inverse;
}

// sum[q][i] = what query q's weights make of numbers d + i * LANES .. of all values.
template <typename T, int Q, int V>
inline void mix(const float* weights, int64_t stride, const Past<T>& values, const Past<T>& next, int64_t count,
                int64_t d, Vec (&sum)[Q][V]) {
  for (int64_t t = 0; t < count; ++t) {
    const T* value = values[t] + d;
    if (next.data) expect(next[t] + d, V * LANES * int64_t(sizeof(T)));
    Vec x[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) x[i] = load_vec(value + i * LANES);
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) sum[q][i] += weights[q * stride + t] * x[i];
  }
}

// One head of one row.
template <typename T>
struct Head {
  const WindowAttention<T>& call;
  int64_t row, head, seen, live;

  T* place(const Ring<T>& ring) const { return ring.data + call.step.slots[row] * ring.slot + head * ring.head; }
  Past<T> past(const Ring<T>& ring, int64_t frame) const {
    return {place(ring), call.capacity, ring.frame, frame % call.capacity};
  }
  template <typename U>
  U* frame_of(const Frames<U>& of, int64_t frame) const {
    return of.data + row * of.row + frame * of.frame + head * of.head;
  }
  // The window of a frame of the chunk: [begin, end), frames of the session.
  int64_t begin(int64_t frame) const { return std::max<int64_t>(0, block_of(frame) - call.left); }
  int64_t end(int64_t frame) const { return std::min(block_of(frame) + call.block, seen + live); }
  int64_t block_of(int64_t frame) const { return (seen + frame) / call.block * call.block; }

  void keep(const Frames<const T>& from, const Ring<T>& ring) const {
    T* to = place(ring);
    for (int64_t frame = 0; frame < live; ++frame)
      std::memcpy(static_cast<void*>(to + (seen + frame) % call.capacity * ring.frame), frame_of(from, frame),
                  size_t(call.head_dim) * sizeof(T));
  }

  // Frames first .. first + count, at most Q of them: together, for most of what they see is the same.
  template <int Q>
  void attend(int64_t first, int64_t count, float* scratch, int64_t stride) const {
    const int64_t dim = call.head_dim, padded = (dim + LANES - 1) / LANES * LANES;
    const int64_t from = begin(first), span = end(first + count - 1) - from;
    float *query = scratch, *scores = scratch + Q * padded;
    for (int q = 0; q < Q; ++q) {
      const T* given = frame_of(call.q, first + std::min<int64_t>(q, count - 1));
      for (int64_t d = 0; d < dim; ++d) query[q * padded + d] = load(given[d]);
      std::fill(query + q * padded + dim, query + (q + 1) * padded, 0.0f);
    }
    const Past<T> keys = past(call.keys, from), values = past(call.values, from);
    // The first frames bring the values near, the last ones the keys of the next head.
    Past<T> next_values = values, next_keys = keys;
    if (first > 0) next_values.data = nullptr;
    next_keys.data = first + count < live || head + 1 == call.heads ? nullptr : keys.data + call.keys.head;
    score<T, Q>(query, keys, next_values, span, dim, scores, stride);
    for (int q = 0; q < Q; ++q) {
      const int64_t frame = first + std::min<int64_t>(q, count - 1);
      const int64_t before = begin(frame) - from, after = end(frame) - from;
      float* own = scores + q * stride;
      if (call.bias.single)
        weigh_frame<float>(frame, own + before, after - before);
      else
        weigh_frame<T>(frame, own + before, after - before);
      std::fill(own, own + before, 0.0f);
      std::fill(own + after, own + span, 0.0f);
    }
    int64_t d = 0;
    for (; d + BREADTH * LANES <= dim; d += BREADTH * LANES) {
      Vec sum[Q][BREADTH] = {};
      mix<T, Q, BREADTH>(scores, stride, values, next_keys, span, d, sum);
      for (int q = 0; q < count; ++q)
        for (int i = 0; i < BREADTH; ++i)
          save_some(frame_of(call.out, first + q) + d + i * LANES, sum[q][i], LANES);
    }
    for (; d + LANES <= dim; d += LANES) {
      Vec sum[Q][1] = {};
      mix<T, Q, 1>(scores, stride, values, next_keys, span, d, sum);
      for (int q = 0; q < count; ++q) save_some(frame_of(call.out, first + q) + d, sum[q][0], LANES);
    }
    if (d == dim) return;
    for (int q = 0; q < count; ++q) {
      Vec sum = {};
      for (int64_t t = 0; t < span; ++t) sum += scores[q * stride + t] * load_part(values[t] + d, dim - d);
      save_some(frame_of(call.out, first + q) + d, sum, dim - d);
    }
  }

  template <typename B>
  void weigh_frame(int64_t frame, float* scores, int64_t count) const {
    const Bias& bias = call.bias;
    const B* at = static_cast<const B*>(bias.data);
    const int64_t column = begin(frame) - seen + call.left;
    if (at) at += row * bias.row + head * bias.head + frame * bias.frame + column * bias.column;
    weigh(scores, count, at, bias.column, 1.0f / std::sqrt(float(call.head_dim)));
  }
};

template <typename T>
void window_attention(const WindowAttention<T>& call, ParallelFor parallel) {
  const Step& step = call.step;
  const int64_t padded = (call.head_dim + LANES - 1) / LANES * LANES;
  const int64_t stride = (call.left + step.frames + 2 * LANES) / LANES * LANES;
  auto one = [&](int64_t item) {
    thread_local std::vector<float> scratch;
    scratch.resize(size_t(QUERIES * (padded + stride) + LANES));
    const int64_t row = item / call.heads;
    const Head<T> head{call, row, item % call.heads, step.seen[row], step.live[row]};
    head.keep(call.k, call.keys);
    head.keep(call.v, call.values);
    for (int64_t frame = 0; frame < head.live;) {
      const int64_t rest = head.live - frame, count = rest > 2 ? std::min<int64_t>(rest, QUERIES) : rest;
      if (count > 2)
        head.template attend<QUERIES>(frame, count, scratch.data(), stride);
      else if (count == 2)
        head.template attend<2>(frame, count, scratch.data(), stride);
      else
        head.template attend<1>(frame, count, scratch.data(), stride);
      frame += count;
    }
    for (int64_t frame = head.live; frame < step.frames; ++frame)
      std::memset(static_cast<void*>(head.frame_of(call.out, frame)), 0, size_t(call.head_dim) * sizeof(T));
  };
  run(step.rows * call.heads, parallel, one);
}

// F frames of LANES channels: they share the weights. `input` holds the frames, STRIP numbers each, from the one on
// that the first tap of the first frame meets.
constexpr int STRIP = 64;
template <int F>
inline void convolve(const float* input, const float* weight, int64_t width, int64_t taps, Vec (&sum)[F]) {
  for (int64_t tap = 0; tap < taps; ++tap) {
    Vec w = load_vec(weight + tap * width);
#pragma GCC unroll 4
    for (int i = 0; i < F; ++i) sum[i] += w * load_vec(input + (tap + i) * STRIP);
  }
}

template <typename T>
void causal_conv(const CausalConv<T>& call, ParallelFor parallel) {
  const Step& step = call.step;
  const int64_t kept = call.taps - 1, wide = kept + step.frames;
  const int64_t width = (call.channels + STRIP - 1) / STRIP * STRIP;
  // The weights and the bias, channels side by side: once, for all rows and threads.
  thread_local std::vector<float> turned;
  turned.resize(size_t((call.taps + 1) * width));
  float *weight = turned.data(), *bias = weight + call.taps * width;
  for (int64_t c = 0; c < call.channels; ++c) {
    const T* from = call.weight + c * call.weight_channel;
    for (int64_t tap = 0; tap < call.taps; ++tap) weight[tap * width + c] = load(from[tap * call.weight_tap]);
    bias[c] = call.bias ? load(call.bias[c]) : 0.0f;
  }
  auto one = [&](int64_t row) {
    thread_local std::vector<float> scratch;
    scratch.resize(size_t(wide * STRIP));
    float* input = scratch.data();
    for (int64_t first = 0; first < call.channels; first += STRIP) {
      const int64_t count = std::min<int64_t>(STRIP, call.channels - first);
      T* tail = call.tail + step.slots[row] * call.tail_slot + first;
      const T* x = call.x.data + row * call.x.row + first;
      T* out = call.out.data + row * call.out.row + first;
      auto frame = [&](int64_t i) -> const T* {
        return i < kept ? tail + i * call.tail_frame : x + (i - kept) * call.x.frame;
      };
      for (int64_t i = 0; i < wide; ++i)
        for (int64_t c = 0; c < count; c += LANES) {
          Vec given = count - c < LANES ? load_part(frame(i) + c, count - c) : load_vec(frame(i) + c);
          std::memcpy(input + i * STRIP + c, &given, sizeof(given));
        }
      auto some = [&](int64_t e, auto frames) {
        constexpr int F = decltype(frames)::value;
        for (int64_t c = 0; c < count; c += LANES) {
          Vec sum[F];
          for (Vec& start : sum) start = load_vec(bias + first + c);
          convolve<F>(input + e * STRIP + c, weight + first + c, width, call.taps, sum);
          for (int i = 0; i < F; ++i) save_some(out + (e + i) * call.out.frame + c, sum[i], count - c);
        }
        return e + F;
      };
      int64_t e = 0;
      while (e + 4 <= step.frames) e = some(e, std::integral_constant<int, 4>());
      while (e + 2 <= step.frames) e = some(e, std::integral_constant<int, 2>());
      while (e < step.frames) e = some(e, std::integral_constant<int, 1>());
      const int64_t live = step.live[row];
      for (int64_t i = 0; live && i < kept; ++i)
        std::memmove(static_cast<void*>(tail + i * call.tail_frame), frame(i + live), size_t(count) * sizeof(T));
    }
  };
  run(step.rows, parallel, one);
}

}  // namespace

extern const StreamingKernels<float> streaming_f32 = {window_attention<float>, causal_conv<float>};
extern const StreamingKernels<bf16> streaming_bf16 = {window_attention<bf16>, causal_conv<bf16>};

}  // namespace asr_serve::ASR_SERVE_ISA
