// Compiled for AVX512-BF16 alone, called where the processor has it. A piece of work is one head of some queries of one
// clip: its keys and values are packed into the cache once, and the scores of a few queries stay there until they are
// weights. A query's numbers do not depend on the clips beside its own, nor on the piece that it is in.
#include "attention.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention_pieces.h"
#include "floats.h"

namespace asr_serve {
namespace ASR_SERVE_ISA {
namespace {

#define ASR_SERVE_UNROLL _Pragma("GCC unroll 8")

constexpr int64_t LANES = 16;
// Queries whose scores stay in the first cache, by as many blocks of keys as fill the registers with sums.
constexpr int ROWS = 6, WIDE = 4;
// Queries of a piece of work: long clips are shared out, and packing their keys anew takes less than a tenth.
constexpr int64_t QUERIES = 80 * ROWS;
constexpr float LOG2_E = 1.44269504f;

inline __mmask16 first_lanes(int64_t count) { return __mmask16(count >= LANES ? 0xffff : (1u << count) - 1); }

inline __m512i widen_bits(const uint16_t* from, __mmask16 mask) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
}
inline __m512 widen(const uint16_t* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(widen_bits(from, mask), 16));
}
inline void narrow(uint16_t* to, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

inline int32_t pair_at(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}

// One frame's query or key, rotated for its position.
inline void load_rotated(const ClipAttention<uint16_t>& call, const uint16_t* from, int64_t position, uint16_t* to) {
  std::memcpy(to, from, size_t(call.head_dim) * 2);
  const float *cos = call.cos + position * call.half, *sin = call.sin + position * call.half;
  for (int64_t i = 0; i < call.half; i += LANES) {
    const __mmask16 mask = first_lanes(call.half - i);
    const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
    const __m512 x = widen(from + i, mask), y = widen(from + call.half + i, mask);
    narrow(to + i, mask, _mm512_fmsub_ps(x, c, _mm512_mul_ps(y, s)));
    narrow(to + call.half + i, mask, _mm512_fmadd_ps(y, c, _mm512_mul_ps(x, s)));
  }
}

// Two to the power of x <= 0, as exactly as a bf16 holds it. NaN stays NaN.
inline __m512 exp2_short(__m512 x) {
  constexpr int FLOOR = 0x01 | 0x08;
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // the second operand where one is NaN
  const __m512 r = _mm512_reduce_ps(x, FLOOR);
  __m512 p = _mm512_set1_ps(7.8024523e-2f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.2606717e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9583353e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.9992522e-1f));
  return _mm512_scalef_ps(p, x);
}

// The head of one clip, packed for the products of ROWS queries.
struct Head {
  int64_t frames, padded, pairs, width;  // padded: to whole blocks of keys; pairs: of head_dim; width: of a value
  uint16_t* keys;                        // (padded / 16, pairs, 16, 2)
  uint16_t* values;                      // (padded / 2, width, 2)
  float* scores;                         // (ROWS, padded), and then their weights as bf16
};

void pack(const ClipAttention<uint16_t>& call, const uint16_t* k, const uint16_t* v, int64_t stride, const Head& head) {
  const int64_t dim = call.head_dim, block = head.pairs * LANES * 2;
  uint16_t row[LONGEST_HEAD];
  row[2 * head.pairs - 1] = 0;
  for (int64_t i = 0; i < head.padded; ++i) {
    uint16_t* to = head.keys + i / LANES * block + i % LANES * 2;
    if (i < head.frames)
      load_rotated(call, k + i * stride, i, row);
    else
      std::memset(row, 0, size_t(dim) * 2);
    for (int64_t p = 0; p < head.pairs; ++p) std::memcpy(to + p * LANES * 2, row + 2 * p, 4);
  }
  for (int64_t i = 0; i < head.padded; i += 2)
    for (int64_t d = 0; d < head.width; d += LANES) {
      const __mmask16 mask = first_lanes(dim - d);
      const __m512i even = widen_bits(v + i * stride + d, i < head.frames ? mask : 0);
      const __m512i odd = widen_bits(v + (i + 1) * stride + d, i + 1 < head.frames ? mask : 0);
      _mm512_store_si512(head.values + (i * head.width) + d * 2, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

template <int V>
void score_keys(const Head& head, const uint16_t* queries, int64_t block) {
  const int64_t stride = head.pairs * LANES * 2;
  const uint16_t* keys = head.keys + block * stride;
  __m512 sums[ROWS][V];
  ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] =
      _mm512_setzero_ps();
  for (int64_t p = 0; p < head.pairs; ++p) {
    __m512bh k[V];
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) k[v] =
        (__m512bh)_mm512_load_si512(keys + v * stride + p * LANES * 2);
    ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) {
      const __m512bh q = (__m512bh)_mm512_set1_epi32(pair_at(queries + (r * head.pairs + p) * 2));
      ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], k[v], q);
    }
  }
  ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) ASR_SERVE_UNROLL for (int v = 0; v < V; ++v)
      _mm512_store_ps(head.scores + r * head.padded + (block + v) * LANES, sums[r][v]);
}

void score(const Head& head, const uint16_t* queries) {
  const int64_t blocks = head.padded / LANES;
  int64_t block = 0;
  for (; block + WIDE <= blocks; block += WIDE) score_keys<WIDE>(head, queries, block);
  switch (blocks - block) {
    case 3: return score_keys<3>(head, queries, block);
    case 2: return score_keys<2>(head, queries, block);
    case 1: return score_keys<1>(head, queries, block);
  }
}

// Scores of one query to weights, as bf16 over the same memory; their sum's inverse.
float weigh(const Head& head, float* scores, float scale) {
  for (int64_t i = head.frames; i < head.padded; ++i) scores[i] = -INFINITY;
  __m512 top = _mm512_load_ps(scores);
  for (int64_t i = LANES; i < head.padded; i += LANES) top = _mm512_max_ps(top, _mm512_load_ps(scores + i));
  const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(_mm512_reduce_max_ps(top) * scale);
  auto* weights = reinterpret_cast<uint16_t*>(scores);
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < head.padded; i += LANES) {
    const __m512 e = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(scores + i), factor, shift));
    total = _mm512_add_ps(total, e);
    _mm256_store_si256(reinterpret_cast<__m256i*>(weights + i), (__m256i)_mm512_cvtneps_pbh(e));
  }
  return 1.0f / _mm512_reduce_add_ps(total);
}

// Columns d .. d + 16 V of the weighted sums of values, for the `rows` queries that there are.
template <int V>
void mix(const Head& head, const float* inverse, int64_t d, int64_t dim, uint16_t* out, int64_t stride, int64_t rows) {
  const auto* weights = reinterpret_cast<const uint16_t*>(head.scores);
  __m512 sums[ROWS][V];
  ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] =
      _mm512_setzero_ps();
  for (int64_t i = 0; i < head.padded; i += 2) {
    __m512bh values[V];
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) values[v] =
        (__m512bh)_mm512_load_si512(head.values + i * head.width + (d + v * LANES) * 2);
    ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) {
      const __m512bh w = (__m512bh)_mm512_set1_epi32(pair_at(weights + r * 2 * head.padded + i));
      ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], values[v], w);
    }
  }
  ASR_SERVE_UNROLL for (int r = 0; r < ROWS; ++r) {
    if (r == rows) return;
    const __m512 times = _mm512_set1_ps(inverse[r]);
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v)
        narrow(out + r * stride + d + v * LANES, first_lanes(std::max<int64_t>(0, dim - d - v * LANES)),
               _mm512_mul_ps(sums[r][v], times));
  }
}

void attend(const ClipAttention<uint16_t>& call, const Piece& piece) {
  thread_local std::vector<Line> key_lines, value_lines, score_lines;
  const int64_t width = call.heads * call.head_dim, stride = 3 * width;
  Head head{.frames = piece.frames, .padded = round_up(piece.frames, LANES), .pairs = (call.head_dim + 1) / 2,
            .width = round_up(call.head_dim, LANES), .keys = nullptr, .values = nullptr, .scores = nullptr};
  head.keys = scratch<uint16_t>(key_lines, head.padded * head.pairs * 2);
  head.values = scratch<uint16_t>(value_lines, head.padded * head.width);
  head.scores = scratch<float>(score_lines, ROWS * head.padded);
  const uint16_t* q = call.qkv + piece.offset * stride + piece.head * call.head_dim;
  pack(call, q + width, q + 2 * width, stride, head);
  uint16_t* out = call.out + piece.offset * width + piece.head * call.head_dim;
  uint16_t queries[ROWS * LONGEST_HEAD];
  float inverse[ROWS];
  for (int64_t first = piece.first, end = first + piece.queries; first < end; first += ROWS) {
    const int64_t rows = std::min<int64_t>(ROWS, end - first);
    for (int64_t r = 0; r < ROWS; ++r) {
      uint16_t* row = queries + r * head.pairs * 2;
      row[2 * head.pairs - 1] = 0;
      if (r < rows)
        load_rotated(call, q + (first + r) * stride, first + r, row);
      else
        std::memset(row, 0, size_t(call.head_dim) * 2);
    }
    score(head, queries);
    for (int64_t r = 0; r < ROWS; ++r) inverse[r] = weigh(head, head.scores + r * head.padded, call.scale * LOG2_E);
    uint16_t* to = out + first * width;
    int64_t d = 0;
    for (; head.width - d > WIDE * LANES; d += 3 * LANES) mix<3>(head, inverse, d, call.head_dim, to, width, rows);
    switch ((head.width - d) / LANES) {
      case 4: mix<4>(head, inverse, d, call.head_dim, to, width, rows); break;
      case 3: mix<3>(head, inverse, d, call.head_dim, to, width, rows); break;
      case 2: mix<2>(head, inverse, d, call.head_dim, to, width, rows); break;
      case 1: mix<1>(head, inverse, d, call.head_dim, to, width, rows); break;
    }
  }
}

void attend_clips(const ClipAttention<uint16_t>& call, ParallelFor parallel) {
  const std::vector<Piece> pieces = pieces_of(call, ROWS, QUERIES);
  auto one = [&](int64_t item) { attend(call, pieces[size_t(item)]); };
  run(int64_t(pieces.size()), parallel, one);
}

}  // namespace
}  // namespace ASR_SERVE_ISA

AttendClips<uint16_t> find_clip_attention() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
             ? ASR_SERVE_ISA::attend_clips
             : nullptr;
}

}  // namespace asr_serve
#else
namespace asr_serve {
AttendClips<uint16_t> find_clip_attention() { return nullptr; }
}  // namespace asr_serve
#endif
