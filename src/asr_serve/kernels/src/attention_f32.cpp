// In float32, by the plan of attention.cpp: keys and values of a head are packed once for each piece of work, and the
// scores of a few queries stay in the cache until they are weights. Sums are added up in one order, so that a query's
// numbers do not depend on the clips beside its own, nor on the piece that it is in.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.h"
#include "attention_pieces.h"
#include "floats.h"
#include "vectors.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

#define ASR_SERVE_UNROLL _Pragma("GCC unroll 8")

// Queries whose scores are computed together, by as many vectors of keys as fill the registers with sums.
constexpr int ROWS = 6, WIDE = LANES == 16 ? 4 : 2;
constexpr int64_t QUERIES = 80 * ROWS;
constexpr float LOG2_E = 1.44269504f;

// std::fill of floats would be one function for all instruction sets.
inline void fill(float* from, float* to, float x) {
  for (; from < to; ++from) *from = x;
}
inline Vec spread(float x) { return x - Vec{}; }
inline void save_vec(float* to, Vec x) { std::memcpy(to, &x, sizeof(x)); }

// Two to the power of x <= 0, but for 3e-9 of it; below -126 as of -126. NaN stays NaN.
inline Vec exp2_of(Vec x) {
  constexpr float MAGIC = 12582912.0f;  // added, it leaves no bits for a fraction
  x = x < -126.0f ? spread(-126.0f) : x;
  const Vec shifted = x + MAGIC, n = shifted - MAGIC, r = x - n;
  Vec p = spread(1.5461444854736328e-4f);
  p = p * r + 1.3400427997112274e-3f;
  p = p * r + 9.618056938052177e-3f;
  p = p * r + 5.550327152013779e-2f;
  p = p * r + 2.4022650718688965e-1f;
  p = p * r + 6.931471824645996e-1f;
  p = p * r + 1.0f;
  p = (Vec)((Words)p + ((Words)shifted << 23));
  return x == x ? p : x;
}

inline float sum_of(Vec x) {
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}

// One frame's query or key, rotated for its position, `step` numbers apart.
inline void load_rotated(const ClipAttention<float>& call, const float* from, int64_t position, float* to, int64_t step) {
  const float *cos = call.cos + position * call.half, *sin = call.sin + position * call.half;
  for (int64_t i = 0; i < call.half; ++i) {
    const float x = from[i], y = from[call.half + i];
    to[i * step] = x * cos[i] - y * sin[i];
    to[(call.half + i) * step] = y * cos[i] + x * sin[i];
  }
  for (int64_t i = 2 * call.half; i < call.head_dim; ++i) to[i * step] = from[i];
}

// The head of one clip, packed for the products of ROWS queries.
struct Head {
  int64_t frames, padded, dim, width;  // padded: to whole vectors of keys; width: dim, to whole vectors
  float* keys;                         // (padded / LANES, dim, LANES)
  float* values;                       // (frames, width)
  float* scores;                       // (ROWS, padded), and then their weights
};

void pack(const ClipAttention<float>& call, const float* k, const float* v, int64_t stride, const Head& head) {
  for (int64_t i = 0; i < head.padded; ++i) {
    float* to = head.keys + i / LANES * head.dim * LANES + i % LANES;
    if (i < head.frames)
      load_rotated(call, k + i * stride, i, to, LANES);
    else
      for (int64_t d = 0; d < head.dim; ++d) to[d * LANES] = 0;
  }
  for (int64_t i = 0; i < head.frames; ++i) {
    float* to = head.values + i * head.width;
    std::memcpy(to, v + i * stride, size_t(head.dim) * sizeof(float));
    fill(to + head.dim, to + head.width, 0.0f);
  }
}

template <int V>
void score_keys(const Head& head, const float* queries, int64_t block) {
  const int64_t stride = head.dim * LANES;
  const float* keys = head.keys + block * stride;
  Vec sums[ROWS][V] = {};
  for (int64_t d = 0; d < head.dim; ++d) {
    Vec k[V];
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) k[v] = load_vec(keys + v * stride + d * LANES);
    ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) {
      const Vec q = spread(queries[r * head.dim + d]);
      ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] += k[v] * q;
    }
  }
  ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) ASR_SERVE_UNROLL for (int v = 0; v < V; ++v)
      save_vec(head.scores + r * head.padded + (block + v) * LANES, sums[r][v]);
}

void score(const Head& head, const float* queries) {
  const int64_t blocks = head.padded / LANES;
  int64_t block = 0;
  for (; block + WIDE <= blocks; block += WIDE) score_keys<WIDE>(head, queries, block);
  for (; block < blocks; ++block) score_keys<1>(head, queries, block);
}

// Scores of one query to weights in place; their sum's inverse.
float weigh(const Head& head, float* scores, float scale) {
  fill(scores + head.frames, scores + head.padded, -INFINITY);
  Vec top = load_vec(scores);
  for (int64_t i = LANES; i < head.padded; i += LANES) {
    const Vec x = load_vec(scores + i);
    top = x > top ? x : top;
  }
  float most = top[0];
  for (int i = 1; i < LANES; ++i) most = std::max(most, top[i]);
  Vec total{};
  for (int64_t i = 0; i < head.padded; i += LANES) {
    const Vec e = exp2_of((load_vec(scores + i) - most) * scale);
    total += e;
    save_vec(scores + i, e);
  }
  return 1.0f / sum_of(total);
}

// Columns d .. d + LANES V of the weighted sums of values, for the `rows` queries that there are.
template <int V>
void mix(const Head& head, const float* inverse, int64_t d, float* out, int64_t stride, int64_t rows) {
  Vec sums[ROWS][V] = {};
  for (int64_t i = 0; i < head.frames; ++i) {
    Vec values[V];
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) values[v] = load_vec(head.values + i * head.width + d + v * LANES);
    ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) {
      const Vec w = spread(head.scores[r * head.padded + i]);
      ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] += values[v] * w;
    }
  }
  ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) {
    if (r == rows) return;
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) {
      float mixed[LANES];
      save_vec(mixed, sums[r][v] * inverse[r]);
      const int64_t from = d + v * LANES;
      std::memcpy(out + r * stride + from, mixed, size_t(std::min<int64_t>(LANES, head.dim - from)) * sizeof(float));
    }
  }
}

void attend(const ClipAttention<float>& call, const Piece& piece) {
  thread_local std::vector<Line> key_lines, value_lines, score_lines;
  const int64_t width = call.heads * call.head_dim, stride = 3 * width;
  Head head{.frames = piece.frames, .padded = round_up(piece.frames, LANES), .dim = call.head_dim,
            .width = round_up(call.head_dim, LANES), .keys = nullptr, .values = nullptr, .scores = nullptr};
  head.keys = scratch<float>(key_lines, head.padded * head.dim);
  head.values = scratch<float>(value_lines, head.frames * head.width);
  head.scores = scratch<float>(score_lines, ROWS * head.padded);
  const float* q = call.qkv + piece.offset * stride + piece.head * call.head_dim;
  pack(call, q + width, q + 2 * width, stride, head);
  float* out = call.out + piece.offset * width + piece.head * call.head_dim;
  float queries[ROWS * LONGEST_HEAD], inverse[ROWS];
  for (int64_t first = piece.first, end = first + piece.queries; first < end; first += ROWS) {
    const int64_t rows = std::min<int64_t>(ROWS, end - first);
    for (int64_t r = 0; r < ROWS; ++r)
      if (r < rows)
        load_rotated(call, q + (first + r) * stride, first + r, queries + r * head.dim, 1);
      else
        fill(queries + r * head.dim, queries + (r + 1) * head.dim, 0.0f);
    score(head, queries);
    for (int64_t r = 0; r < ROWS; ++r) inverse[r] = weigh(head, head.scores + r * head.padded, call.scale * LOG2_E);
    float* to = out + first * width;
    int64_t d = 0;
    for (; d + 2 * LANES <= head.width; d += 2 * LANES) mix<2>(head, inverse, d, to, width, rows);
    if (d < head.width) mix<1>(head, inverse, d, to, width, rows);
  }
}

void attend_clips(const ClipAttention<float>& call, ParallelFor parallel) {
  const std::vector<Piece> pieces = pieces_of(call, ROWS, QUERIES);
  auto one = [&](int64_t item) { attend(call, pieces[size_t(item)]); };
  run(int64_t(pieces.size()), parallel, one);
}

}  // namespace

extern const AttendClips<float> attend_clips_f32 = attend_clips;

}  // namespace asr_serve::ASR_SERVE_ISA
