// Compiled once per instruction set (see CMakeLists.txt).
#include "decoder.h"

#include <algorithm>
#include <vector>

#include "floats.h"
#include "vectors.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

// Numbers from which threads are worth waking.
constexpr int64_t SHARED = 1 << 15;

template <typename F>
void run_rows(int64_t rows, int64_t width, ParallelFor parallel, F&& each) {
  if (rows * width < SHARED) {
    for (int64_t row = 0; row < rows; ++row) each(row);
    return;
  }
  const int64_t size = std::max<int64_t>(1, rows / 16);
  auto block = [&](int64_t item) {
    for (int64_t row = item * size; row < std::min(rows, (item + 1) * size); ++row) each(row);
  };
  run((rows + size - 1) / size, parallel, block);
}

template <typename T>
inline float inverse_rms(const T* x, int64_t n, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load(x[i]) * load(x[i]);
  return 1.0f / std::sqrt(sum / float(n) + eps);
}

template <typename T>
void rms_norm(const T* x, const float* weight, T* out, int64_t rows, int64_t width, float eps, ParallelFor parallel) {
  run_rows(rows, width, parallel, [&](int64_t row) {
    const T* from = x + row * width;
    T* to = out + row * width;
    const float scale = inverse_rms(from, width, eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) save(to + i, load(from[i]) * scale * weight[i]);
  });
}

template <typename T>
void rotate_append(T* qkv, int64_t rows, const Rotation& r, Pages pages, const int32_t* tables, int64_t table_stride,
                   ParallelFor parallel) {
  const int dim = r.head_dim, half = dim / 2, rotated = r.heads + r.kv_heads;
  const int64_t width = int64_t(rotated + r.kv_heads) * dim, values = int64_t(r.kv_heads) * dim * PAGE;
  run_rows(rows, width, parallel, [&](int64_t row) {
    const int64_t position = r.positions[row];
    const float *c = r.cos + position * half, *s = r.sin + position * half;
    T* k_page = static_cast<T*>(pages.data) + tables[row * table_stride + position / PAGE] * pages.page_stride +
                pages.layer_offset;
    T* v_page = k_page + values;
    const int64_t slot = position % PAGE;
    for (int head = 0; head < rotated; ++head) {
      T* x = qkv + row * width + int64_t(head) * dim;
      float normed[512], turned[512];
      const float scale = r.norms ? inverse_rms(x, dim, r.eps) : 1.0f;
      if (r.norms) {
        const float* weight = r.norms + int64_t(head) * dim;
#pragma omp simd
        for (int i = 0; i < dim; ++i) normed[i] = load(x[i]) * scale * weight[i];
      } else {
#pragma omp simd
        for (int i = 0; i < dim; ++i) normed[i] = load(x[i]);
      }
#pragma omp simd
      for (int i = 0; i < half; ++i) {
        turned[i] = normed[i] * c[i] - normed[half + i] * s[i];
        turned[half + i] = normed[half + i] * c[i] + normed[i] * s[i];
      }
      if (head < r.heads) {
#pragma omp simd
        for (int i = 0; i < dim; ++i) save(x + i, turned[i]);
      } else {
        T* to = k_page + int64_t(head - r.heads) * dim * PAGE + slot;
        for (int i = 0; i < dim; ++i) save(to + i * PAGE, turned[i]);
      }
    }
    for (int head = 0; head < r.kv_heads; ++head)
      std::memcpy(static_cast<void*>(v_page + (head * PAGE + slot) * dim),
                  qkv + row * width + int64_t(rotated + head) * dim, size_t(dim) * sizeof(T));
  });
}

template <typename T>
void layer_norm(const T* x, const float* weight, const float* bias, T* out, int64_t rows, int64_t width, float eps,
                ParallelFor parallel) {
  run_rows(rows, width, parallel, [&](int64_t row) {
    const T* from = x + row * width;
    T* to = out + row * width;
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += load(from[i]);
    const float mean = sum / float(width);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += (load(from[i]) - mean) * (load(from[i]) - mean);
    const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
    if (bias) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) save(to + i, (load(from[i]) - mean) * scale * weight[i] + bias[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) save(to + i, (load(from[i]) - mean) * scale * weight[i]);
    }
  });
}

template <typename T>
void gate(const T* gate, const T* up, int64_t stride, T* out, int64_t rows, int64_t width, Activation activation,
          ParallelFor parallel) {
  run_rows(rows, width, parallel, [&](int64_t row) {
    gate_numbers(gate + row * stride, up + row * stride, out + row * width, width, activation);
  });
}

template <typename T>
void gelu_rows(T* x, int64_t rows, int64_t width, ParallelFor parallel) {
  run_rows(rows, width, parallel, [&](int64_t row) {
    T* numbers = x + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) save(numbers + i, gelu(load(numbers[i])));
  });
}

// --- attention ---------------------------------------------------------------------------------------------

// Arrays that a loop indexes do not stay in registers.
#define ASR_SERVE_UNROLL _Pragma("GCC unroll 8")

constexpr int PARTS = PAGE / LANES;      // vectors of the scores of a page
constexpr int64_t RUN_ROWS = 16;         // rows of a sequence that read a page together
constexpr int64_t MOST_QUERIES = 8;      // queries whose sums fill the registers

// The processor's own prefetcher does not see where tables lead: a line of the next page for each line that is read.
inline void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// Neighbouring rows of one sequence, a position each.
struct Run {
  int64_t first, count;
};

// scores[i][t] = q[i] . K[:, t] for the PAGE positions of a page. Even and odd dimensions are summed apart, so that a
// product does not wait for the one before.
template <int N, typename T>
inline void page_scores(const float* q, const T* k, const T* next, int dim, float* scores, int64_t stride) {
  for (int part = 0; part < PARTS; ++part) {
    Vec even[N], odd[N];
    ASR_SERVE_UNROLL
    for (int i = 0; i < N; ++i) even[i] = odd[i] = Vec{};
    int d = 0;
    for (; d + 2 <= dim; d += 2) {
      fetch(next + d * PAGE);
      const Vec a = load_vec(k + d * PAGE + part * LANES), b = load_vec(k + (d + 1) * PAGE + part * LANES);
      ASR_SERVE_UNROLL
      for (int i = 0; i < N; ++i) {
        even[i] += q[i * dim + d] * a;
        odd[i] += q[i * dim + d + 1] * b;
      }
    }
    if (d < dim) {
      const Vec a = load_vec(k + d * PAGE + part * LANES);
      ASR_SERVE_UNROLL
      for (int i = 0; i < N; ++i) even[i] += q[i * dim + d] * a;
    }
    ASR_SERVE_UNROLL
    for (int i = 0; i < N; ++i) {
      const Vec sum = even[i] + odd[i];
      std::memcpy(scores + i * stride + part * LANES, &sum, sizeof sum);
    }
  }
}

// totals[i] += weights[i] . V over positions from .. end of a page, D vectors of a head at a time.
template <int N, int D, typename T>
inline void page_values(const float* weights, int64_t stride, const T* v, const T* next, int dim, int from, int end,
                        float* totals) {
  for (int at = 0; at < dim; at += D * LANES) {
    Vec sums[N][D];
    ASR_SERVE_UNROLL
    for (int i = 0; i < N; ++i)
      ASR_SERVE_UNROLL
      for (int d = 0; d < D; ++d) sums[i][d] = load_vec(totals + i * dim + at + d * LANES);
    for (int t = from; t < end; ++t) {
      Vec x[D];
      ASR_SERVE_UNROLL
      for (int d = 0; d < D; d += 2) fetch(next + t * dim + at + d * LANES);
      ASR_SERVE_UNROLL
      for (int d = 0; d < D; ++d) x[d] = load_vec(v + t * dim + at + d * LANES);
      ASR_SERVE_UNROLL
      for (int i = 0; i < N; ++i)
        ASR_SERVE_UNROLL
        for (int d = 0; d < D; ++d) sums[i][d] += weights[i * stride + t] * x[d];
    }
    ASR_SERVE_UNROLL
    for (int i = 0; i < N; ++i)
      ASR_SERVE_UNROLL
      for (int d = 0; d < D; ++d) std::memcpy(totals + i * dim + at + d * LANES, &sums[i][d], sizeof(Vec));
  }
}

// The same for heads that are no multiple of a vector.
template <typename T>
inline void page_values_odd(int n, const float* weights, int64_t stride, const T* v, int dim, int from, int end,
                            float* totals) {
  for (int i = 0; i < n; ++i)
    for (int t = from; t < end; ++t) {
      const float weight = weights[i * stride + t];
#pragma omp simd
      for (int d = 0; d < dim; ++d) totals[i * dim + d] += weight * load(v[t * dim + d]);
    }
}

template <int N, typename T>
void all_scores(const float* q, const T* k, const T* next, int dim, float* scores, int64_t stride) {
  page_scores<N>(q, k, next, dim, scores, stride);
}

template <int N, typename T>
void all_values(const float* weights, int64_t stride, const T* v, const T* next, int dim, int from, int end,
                float* totals) {
  constexpr int D = N >= 8 ? 2 : N >= 4 ? 4 : 8;
  if (dim % (D * LANES) == 0) return page_values<N, D>(weights, stride, v, next, dim, from, end, totals);
  if (dim % LANES == 0) return page_values<N, 1>(weights, stride, v, next, dim, from, end, totals);
  page_values_odd(N, weights, stride, v, dim, from, end, totals);
}

template <typename T>
using Scores = void (*)(const float*, const T*, const T*, int, float*, int64_t);
template <typename T>
using Values = void (*)(const float*, int64_t, const T*, const T*, int, int, int, float*);
template <typename T>
constexpr Scores<T> SCORES[] = {all_scores<1, T>, all_scores<2, T>, all_scores<3, T>, all_scores<4, T>,
                                all_scores<5, T>, all_scores<6, T>, all_scores<7, T>, all_scores<8, T>};
template <typename T>
constexpr Values<T> VALUES[] = {all_values<1, T>, all_values<2, T>, all_values<3, T>, all_values<4, T>,
                                all_values<5, T>, all_values<6, T>, all_values<7, T>, all_values<8, T>};

// softmax(scale * x) over [start, end), and 0 before and after, up to `size`, which is whole pages.
inline void softmax_span(float* x, int64_t start, int64_t end, int64_t size, float scale) {
  for (int64_t i = 0; i < start; ++i) x[i] = 0;
  for (int64_t i = end; i < size; ++i) x[i] = 0;
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t i = start; i < end; ++i) top = std::max(top, x[i]);
#pragma omp simd
  for (int64_t i = start; i < end; ++i) x[i] = exp_negative((x[i] - top) * scale);
  Vec sums{};  // a position has the same lane wherever the first page begins
  for (int64_t i = 0; i < size; i += LANES) sums += load_vec(x + i);
  float each[LANES], total = 0;
  std::memcpy(each, &sums, sizeof each);
  for (float sum : each) total += sum;
  const float inverse = 1.0f / total;
#pragma omp simd
  for (int64_t i = start; i < end; ++i) x[i] *= inverse;
}

// One head of the pages, for all queries of a run that read it.
template <typename T>
void attend_run(const GroupedAttention& call, const T* q, T* out, Run run, int head, bool more_heads,
                std::vector<float>& scratch) {
  const int dim = call.pages.head_dim, group = call.group;
  const int64_t size = int64_t(dim) * PAGE, width = int64_t(call.pages.heads) * group * dim;
  const int32_t* table = call.tables + (run.first + run.count - 1) * call.table_stride;
  const int64_t* lengths = call.lengths + run.first;
  auto start_of = [&](int64_t row) {
    return call.window > 0 ? std::max<int64_t>(0, lengths[row] - call.window) : 0;
  };
  const int64_t begin = start_of(0) / PAGE, end = (lengths[run.count - 1] + PAGE - 1) / PAGE;
  const int64_t stride = (end - begin) * PAGE, queries = run.count * group;
  scratch.resize(size_t(queries * (stride + 2 * dim)));
  float *scores = scratch.data(), *exact = scores + queries * stride, *totals = exact + queries * dim;
  for (int64_t row = 0; row < run.count; ++row)
    for (int member = 0; member < group; ++member) {
      const T* from = q + (run.first + row) * call.q_stride + (int64_t(head) * group + member) * dim;
      float* to = exact + (row * group + member) * dim;
      for (int i = 0; i < dim; ++i) to[i] = load(from[i]);
    }
  std::fill(totals, totals + queries * dim, 0.0f);
  const T* keys = static_cast<const T*>(call.pages.data) + call.pages.layer_offset + head * size;
  const T* values = keys + call.pages.heads * size;
  for (int64_t page = begin; page < end; ++page) {
    const T* k = keys + table[page] * call.pages.page_stride;
    const T* next = page + 1 < end ? keys + table[page + 1] * call.pages.page_stride
                                   : values + table[begin] * call.pages.page_stride;
    for (int64_t i = 0; i < queries; i += MOST_QUERIES)
      SCORES<T>[std::min(MOST_QUERIES, queries - i) - 1](exact + i * dim, k, next, dim,
                                                         scores + i * stride + (page - begin) * PAGE, stride);
  }
  for (int64_t row = 0; row < run.count; ++row)
    for (int member = 0; member < group; ++member)
      softmax_span(scores + (row * group + member) * stride, start_of(row) - begin * PAGE,
                   lengths[row] - begin * PAGE, stride, call.scale);
  for (int64_t page = begin; page < end; ++page) {
    const T* v = values + table[page] * call.pages.page_stride;
    const T* next = page + 1 < end ? values + table[page + 1] * call.pages.page_stride
                    : more_heads   ? keys + size + table[begin] * call.pages.page_stride
                                   : v;
    // Beyond these positions a page holds anything, which times 0 need not be 0.
    const int from = page == begin ? int(start_of(0) % PAGE) : 0;
    const int last = int(std::min<int64_t>(PAGE, lengths[run.count - 1] - page * PAGE));
    for (int64_t i = 0; i < queries; i += MOST_QUERIES)
      VALUES<T>[std::min(MOST_QUERIES, queries - i) - 1](scores + i * stride + (page - begin) * PAGE, stride, v, next, dim,
                                                         from, last, totals + i * dim);
  }
  for (int64_t row = 0; row < run.count; ++row)
    for (int member = 0; member < group; ++member) {
      const float* from = totals + (row * group + member) * dim;
      T* to = out + (run.first + row) * width + (int64_t(head) * group + member) * dim;
#pragma omp simd
      for (int i = 0; i < dim; ++i) save(to + i, from[i]);
    }
}

template <typename T>
void attend_grouped(const GroupedAttention& call, const T* q, T* out, ParallelFor parallel) {
  std::vector<Run> runs;
  for (int64_t row = 0; row < call.rows; ++row) {
    if (!runs.empty()) {
      Run& last = runs.back();
      const int64_t before = row - 1, pages = (call.lengths[row] + PAGE - 1) / PAGE;
      if (last.count < RUN_ROWS && call.lengths[row] == call.lengths[before] + 1 &&
          std::equal(call.tables + row * call.table_stride, call.tables + row * call.table_stride + pages - 1,
                     call.tables + before * call.table_stride) &&
          // A position that begins a page is the first that shows which.
          ((call.lengths[row] - 1) % PAGE == 0 || call.tables[row * call.table_stride + pages - 1] ==
                                                      call.tables[before * call.table_stride + pages - 1])) {
        ++last.count;
        continue;
      }
    }
    runs.push_back({row, 1});
  }
  // Half the heads of a run is one piece of work: the last run must not keep one thread alone busy.
  const int heads = call.pages.heads, piece = heads % 2 ? heads : heads / 2, pieces = heads / piece;
  auto one = [&](int64_t item) {
    thread_local std::vector<float> scratch;
    const int first = int(item % pieces) * piece;
    for (int head = first; head < first + piece; ++head)
      attend_run(call, q, out, runs[size_t(item / pieces)], head, head + 1 < first + piece, scratch);
  };
  run(int64_t(runs.size()) * pieces, parallel, one);
}

}  // namespace

extern const DecoderKernels<float> decoder_f32 = {rms_norm<float>, rotate_append<float>, layer_norm<float>, gate<float>, gelu_rows<float>,
                                                  attend_grouped<float>};
extern const DecoderKernels<bf16> decoder_bf16 = {rms_norm<bf16>, rotate_append<bf16>, layer_norm<bf16>, gate<bf16>, gelu_rows<bf16>,
                                                  attend_grouped<bf16>};

}  // namespace asr_serve::ASR_SERVE_ISA
