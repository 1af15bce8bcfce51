// Compiled once per instruction set (see CMakeLists.txt). Plain loops that the compiler turns into vector
// code: constant trip counts where they matter, and `omp simd` where a sum may be reordered.
#include "kernels.h"

#include <algorithm>
#include <vector>

#include "floats.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

// 2^x for x <= 0 when a bf16 is to hold it: 3 terms leave 1e-4, a bf16 rounds at 4e-3.
inline float exp2_short(float x) {
  float clamped = x < -126.0f ? -126.0f : x;
  float n = std::nearbyintf(clamped);
  float r = clamped - n;
  float p = ((5.550411e-2f * r + 2.402265e-1f) * r + 6.931472e-1f) * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &p, 4);
  bits += uint32_t(int32_t(n)) << 23;  // times 2^n
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

// save() for what cannot be NaN.
inline void save_number(float* to, float x) { *to = x; }
inline void save_number(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float sigmoid(float x) {
  float e = exp_negative(-std::fabs(x));
  float positive = 1.0f / (1.0f + e);
  return x < 0 ? 1.0f - positive : positive;
}

// tanh. Near zero the difference of two numbers near 1 keeps no digits of x, and quiet sound is near zero.
inline float hyperbolic(float x) {
  float s = x * x;
  float near = x * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315))));
  float far = 2.0f * sigmoid(2.0f * x) - 1.0f;
  return s < 0.0625f ? near : far;
}

template <typename T>
void rope(T* qkv, const int64_t* positions, const float* cos, const float* sin, int64_t rows, int heads,
          int head_dim, int half, ParallelFor parallel) {
  constexpr int64_t BLOCK = 64;
  auto block = [&](int64_t item) {
    int64_t end = std::min(rows, (item + 1) * BLOCK);
    for (int64_t row = item * BLOCK; row < end; ++row) {
      const float* c = cos + positions[row] * half;
      const float* s = sin + positions[row] * half;
      for (int head = 0; head < 2 * heads; ++head) {
        T* a = qkv + (row * 3 * heads + head) * head_dim;
        T* b = a + half;
#pragma omp simd
        for (int i = 0; i < half; ++i) {
          float x = load(a[i]), y = load(b[i]);
          save(a + i, x * c[i] - y * s[i]);
          save(b + i, y * c[i] + x * s[i]);
        }
      }
    }
  };
  run((rows + BLOCK - 1) / BLOCK, parallel, block);
}

// One row of scores; x is scratch for n floats.
inline void softmax_row(float* __restrict row, float* __restrict, int64_t n, float scale) {
  softmax_floats(row, n, scale);
}
inline void softmax_row(bf16* __restrict row, float* __restrict x, int64_t n, float scale) {
  float top = -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < n; ++j) {
    float value = load(row[j]);
    x[j] = value;
    top = std::max(top, value);
  }
  const float scale2 = scale * 1.44269504f, shift = top * scale2;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) {
    float e = exp2_short(x[j] * scale2 - shift);
    x[j] = e;
    total += e;
  }
  const float inverse = 1.0f / total;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) save_number(row + j, x[j] * inverse);
}

template <typename T>
void softmax(T* scores, const int64_t* lengths, int64_t batch, int64_t inner, int64_t keys, float scale,
             ParallelFor parallel) {
  constexpr int64_t BLOCK = 32;
  int64_t blocks = (inner + BLOCK - 1) / BLOCK;
  auto block = [&](int64_t item) {
    thread_local std::vector<float> buffer;
    buffer.resize(size_t(keys));
    int64_t b = item / blocks, first = (item % blocks) * BLOCK, n = std::min(lengths[b], keys);
    for (int64_t i = first; i < std::min(inner, first + BLOCK); ++i) {
      T* row = scores + (b * inner + i) * keys;
      softmax_row(row, buffer.data(), n, scale);
      std::memset(static_cast<void*>(row + n), 0, size_t(keys - n) * sizeof(T));
    }
  };
  run(batch * blocks, parallel, block);
}

template <typename T>
void store(Pages pages, const T* kv, int64_t frame_stride, int64_t frames, const int32_t* table, int64_t start) {
  int width = pages.heads * pages.head_dim;
  for (int64_t i = 0; i < frames; ++i) {
    int64_t position = start + i;
    int slot = int(position % PAGE);
    T* k_page = static_cast<T*>(pages.data) + table[position / PAGE] * pages.page_stride + pages.layer_offset;
    T* v_page = k_page + int64_t(width) * PAGE;
    const T* k = kv + i * frame_stride;
    for (int j = 0; j < width; ++j) k_page[j * PAGE + slot] = k[j];
    for (int head = 0; head < pages.heads; ++head)
      std::memcpy(static_cast<void*>(v_page + (head * PAGE + slot) * pages.head_dim),
                  k + width + head * pages.head_dim, size_t(pages.head_dim) * sizeof(T));
  }
}

// Ask for the cache lines of `bytes` bytes, to be there a page later. The processor's own prefetcher does not see
// that tables lead from page to page.
inline void expect(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// sums[t] = query . K[:, t] for the PAGE positions of one page.
template <typename T>
inline void page_scores(const float* __restrict query, const T* __restrict k, int dim, float* __restrict scores) {
  float sum[4][PAGE] = {};  // four sums, for one would make every product wait for the one before
  int d = 0;
  for (; d + 4 <= dim; d += 4) {
#pragma omp simd
    for (int t = 0; t < PAGE; ++t) {
      sum[0][t] += query[d] * load(k[d * PAGE + t]);
      sum[1][t] += query[d + 1] * load(k[(d + 1) * PAGE + t]);
      sum[2][t] += query[d + 2] * load(k[(d + 2) * PAGE + t]);
      sum[3][t] += query[d + 3] * load(k[(d + 3) * PAGE + t]);
    }
  }
  for (; d < dim; ++d)
    for (int t = 0; t < PAGE; ++t) sum[0][t] += query[d] * load(k[d * PAGE + t]);
  for (int t = 0; t < PAGE; ++t) scores[t] = (sum[0][t] + sum[1][t]) + (sum[2][t] + sum[3][t]);
}

// total += weights . V over the first `filled` positions of one page. Kept in registers where D is known.
template <typename T, int D>
inline void page_values(const float* __restrict weights, const T* __restrict v, int dim, int filled,
                        float* __restrict total) {
  float sum[2][D ? D : 512];
  for (int d = 0; d < dim; ++d) sum[0][d] = total[d], sum[1][d] = 0;
  int t = 0;
  for (; t + 2 <= filled; t += 2) {
#pragma omp simd
    for (int d = 0; d < dim; ++d) {
      sum[0][d] += weights[t] * load(v[t * dim + d]);
      sum[1][d] += weights[t + 1] * load(v[(t + 1) * dim + d]);
    }
  }
  if (t < filled)
    for (int d = 0; d < dim; ++d) sum[0][d] += weights[t] * load(v[t * dim + d]);
  for (int d = 0; d < dim; ++d) total[d] = sum[0][d] + sum[1][d];
}

// Positions of a row that a query attends to.
struct Span {
  int64_t start, end;
};

// One query, heads first .. first + count of the pool. Page by page, all heads of a page together: that is the order
// in which they lie in memory. D is the head's width when the compiler knows it, 0 when it does not.
template <typename T, int D>
void attend_heads(const Pages& pages, const T* q, T* out, const int32_t* table, Span span, int first, int count,
                  int group, float scale, float* scratch) {
  const int dim = D ? D : pages.head_dim;
  const int64_t size = int64_t(dim) * PAGE;  // of K, or V, of one head in one page
  const int64_t begin = span.start / PAGE, end = (span.end + PAGE - 1) / PAGE, stride = (end - begin) * PAGE;
  const int64_t skipped = span.start % PAGE;  // positions of the first page that come before the span
  const T* data = static_cast<const T*>(pages.data) + pages.layer_offset + first * size;
  const int64_t values = pages.heads * size;
  const int wide = count * group;  // heads of the query
  float *scores = scratch, *queries = scores + wide * stride, *totals = queries + wide * dim;
  q += int64_t(first) * group * dim;
  out += int64_t(first) * group * dim;
  for (int i = 0; i < wide * dim; ++i) queries[i] = load(q[i]), totals[i] = 0;
  for (int64_t page = begin; page < end; ++page) {
    const T* k = data + table[page] * pages.page_stride;
    const T* next = data + table[std::min(page + 1, end - 1)] * pages.page_stride;
    for (int head = 0; head < count; ++head) {
      expect(next + head * size, size * int64_t(sizeof(T)));
      for (int i = head * group; i < (head + 1) * group; ++i)
        page_scores(queries + i * dim, k + head * size, dim, scores + i * stride + (page - begin) * PAGE);
    }
  }
  expect(data + table[begin] * pages.page_stride + values, count * size * int64_t(sizeof(T)));
  for (int i = 0; i < wide; ++i) softmax_floats(scores + i * stride + skipped, span.end - span.start, scale);
  for (int64_t page = begin; page < end; ++page) {
    const T* v = data + table[page] * pages.page_stride + values;
    const T* next = data + table[std::min(page + 1, end - 1)] * pages.page_stride + values;
    const int from = page == begin ? int(skipped) : 0;
    const int filled = int(std::min<int64_t>(PAGE, span.end - page * PAGE)) - from;
    for (int head = 0; head < count; ++head) {
      expect(next + head * size, size * int64_t(sizeof(T)));
      for (int i = head * group; i < (head + 1) * group; ++i)
        page_values<T, D>(scores + i * stride + (page - begin) * PAGE + from, v + head * size + from * dim, dim, filled,
                          totals + i * dim);
    }
  }
  for (int i = 0; i < wide * dim; ++i) save(out + i, totals[i]);
}

template <typename T>
void attend(Pages pages, const T* q, int64_t q_stride, T* out, const int32_t* tables, int64_t table_stride,
            const int64_t* lengths, int64_t rows, int group, int64_t window, float scale, ParallelFor parallel) {
  int64_t width = int64_t(pages.heads) * group * pages.head_dim;
  // Half the heads of a row is one piece of work: the last row of a batch must not keep one thread alone busy.
  int count = pages.heads % 2 ? pages.heads : pages.heads / 2, pieces = pages.heads / count;
  auto call = pages.head_dim == 36    ? attend_heads<T, 36>
              : pages.head_dim == 52  ? attend_heads<T, 52>
              : pages.head_dim == 64  ? attend_heads<T, 64>
              : pages.head_dim == 128 ? attend_heads<T, 128>
                                      : attend_heads<T, 0>;
  auto one = [&](int64_t item) {
    thread_local std::vector<float> scratch;
    int64_t row = item / pieces, length = lengths[row];
    Span span{window > 0 ? std::max<int64_t>(0, length - window) : 0, length};
    int64_t padded = (span.end + PAGE - 1) / PAGE * PAGE - span.start / PAGE * PAGE;
    scratch.resize(size_t(int64_t(count) * group * (padded + 2 * pages.head_dim)));
    call(pages, q + row * q_stride, out + row * width, tables + row * table_stride, span, int(item % pieces) * count,
         count, group, scale, scratch.data());
  };
  run(rows * pieces, parallel, one);
}

template <typename T>
void tanh_norm(float* x, T* out, int64_t items, float eps, ParallelFor parallel) {
  constexpr int64_t BLOCK = 1 << 14;
  int64_t blocks = (items + BLOCK - 1) / BLOCK;
  std::vector<double> partial(static_cast<size_t>(blocks));
  auto end_of = [&](int64_t item) { return std::min(items, (item + 1) * BLOCK); };
  auto squash = [&](int64_t item) {
    float sum = 0;
    float* part = x + item * BLOCK;
    int64_t n = end_of(item) - item * BLOCK;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
      part[i] = hyperbolic(part[i]);
      sum += part[i];
    }
    partial[size_t(item)] = sum;
  };
  run(blocks, parallel, squash);
  double total = 0;
  for (double sum : partial) total += sum;
  float mean = float(total / double(items));
  auto spread = [&](int64_t item) {
    float sum = 0;
    const float* part = x + item * BLOCK;
    int64_t n = end_of(item) - item * BLOCK;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += (part[i] - mean) * (part[i] - mean);
    partial[size_t(item)] = sum;
  };
  run(blocks, parallel, spread);
  total = 0;
  for (double sum : partial) total += sum;
  float scale = 1.0f / std::sqrt(float(total / double(items)) + eps);
  auto write = [&](int64_t item) {
    const float* part = x + item * BLOCK;
    T* to = out + item * BLOCK;
    int64_t n = end_of(item) - item * BLOCK;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) save_number(to + i, (part[i] - mean) * scale);
  };
  run(blocks, parallel, write);
}

void lstm(const float* gates, const float* weight, const int64_t* offsets, const int64_t* lengths, float* h, float* c,
          float* out, int64_t rows, int width, ParallelFor parallel) {
  auto one = [&](int64_t row) {
    thread_local std::vector<float> buffer;
    buffer.resize(size_t(4 * width));
    float* g = buffer.data();
    float *hr = h + row * width, *cr = c + row * width;
    for (int64_t step = offsets[row]; step < offsets[row] + lengths[row]; ++step) {
      std::memcpy(g, gates + step * 4 * width, size_t(4 * width) * sizeof(float));
      for (int k = 0; k < width; k += 4) {  // widths are multiples of 4; four rows of the matrix a pass
        const float* w = weight + int64_t(k) * 4 * width;
        float h0 = hr[k], h1 = hr[k + 1], h2 = hr[k + 2], h3 = hr[k + 3];
#pragma omp simd
        for (int j = 0; j < 4 * width; ++j)
          g[j] += (h0 * w[j] + h1 * w[4 * width + j]) + (h2 * w[8 * width + j] + h3 * w[12 * width + j]);
      }
#pragma omp simd
      for (int j = 0; j < width; ++j) {
        float cell = sigmoid(g[width + j]) * cr[j] + sigmoid(g[j]) * hyperbolic(g[2 * width + j]);
        cr[j] = cell;
        hr[j] = sigmoid(g[3 * width + j]) * hyperbolic(cell);
      }
      std::memcpy(out + step * width, hr, size_t(width) * sizeof(float));
    }
  };
  run(rows, parallel, one);
}

template <typename T>
void pick(const T* logits, const T* hidden, const T* weight, int64_t rows, int64_t vocab, int dim, int64_t* tokens,
          float* logprobs, ParallelFor parallel) {
  constexpr int64_t BLOCK = 512;
  auto one = [&](int64_t row) {
    const T* x = logits + row * vocab;
    thread_local std::vector<float> tops;
    tops.resize(size_t((vocab + BLOCK - 1) / BLOCK));
    float top = -INFINITY;
    for (size_t b = 0; b < tops.size(); ++b) {
      float most = -INFINITY;
      int64_t end = std::min<int64_t>(vocab, (int64_t(b) + 1) * BLOCK);
#pragma omp simd reduction(max : most)
      for (int64_t i = int64_t(b) * BLOCK; i < end; ++i) most = std::max(most, load(x[i]));
      tops[b] = most;
      top = std::max(top, most);
    }
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < vocab; ++i) total += exp_negative(load(x[i]) - top);
    // A bf16 logit is known to 1 part in 256: whoever is that near the top may be the true one.
    float margin = sizeof(T) == 2 ? std::fabs(top) / 128.0f : 0.0f;
    int64_t best = 0;
    float best_exact = -INFINITY;
    for (size_t b = 0; b < tops.size(); ++b) {
      if (tops[b] < top - margin) continue;
      int64_t end = std::min<int64_t>(vocab, (int64_t(b) + 1) * BLOCK);
      for (int64_t i = int64_t(b) * BLOCK; i < end; ++i) {
        if (load(x[i]) < top - margin) continue;
        float exact = load(x[i]);
        if (sizeof(T) == 2) {
          exact = 0;
          const T *h = hidden + row * dim, *w = weight + i * dim;
#pragma omp simd reduction(+ : exact)
          for (int d = 0; d < dim; ++d) exact += load(h[d]) * load(w[d]);
        }
        if (exact > best_exact) best_exact = exact, best = i;
      }
    }
    tokens[row] = best;
    logprobs[row] = std::min(0.0f, best_exact - top - std::log(total));
  };
  run(rows, parallel, one);
}

}  // namespace

extern const Lstm lstm_f32 = lstm;
extern const Kernels<float> kernels_f32 = {rope<float>, softmax<float>, store<float>, attend<float>, pick<float>,
                                             tanh_norm<float>};
extern const Kernels<bf16> kernels_bf16 = {rope<bf16>, softmax<bf16>, store<bf16>, attend<bf16>, pick<bf16>,
                                             tanh_norm<bf16>};

}  // namespace asr_serve::ASR_SERVE_ISA
