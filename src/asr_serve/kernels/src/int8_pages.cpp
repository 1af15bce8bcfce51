// Compiled once per instruction set (see CMakeLists.txt).
#include "int8_pages.h"

#include <algorithm>
#include <vector>

#include "floats.h"
#include "vectors.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

// K, or V, of one layer in one page.
struct Half {
  int8_t* numbers;
  float* scales;
};

template <typename T>
inline Half half_of(const Pages& pages, int32_t page, bool values) {
  const int64_t size = int64_t(pages.heads) * pages.head_dim * PAGE;
  T* from = static_cast<T*>(pages.data) + page * pages.page_stride + pages.layer_offset + (values ? size : 0);
  int8_t* numbers = reinterpret_cast<int8_t*>(from);
  return {numbers, reinterpret_cast<float*>(numbers + size)};
}

// One head of one position as integers `step` apart. What is not finite has a scale that is not.
template <typename T>
float round_head(const T* x, int dim, int8_t* to, int step) {
  uint32_t top = 0;  // by its bits, in which NaN is above all numbers
  for (int i = 0; i < dim; ++i) {
    const float value = load(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    top = std::max(top, bits & 0x7fffffffu);
  }
  float largest;
  std::memcpy(&largest, &top, 4);
  const bool usable = largest > 1e-30f && largest <= 3.4e38f;
  const float inverse = usable ? 127.0f / largest : 0.0f;
  for (int i = 0; i < dim; ++i)
    to[i * step] = usable ? int8_t(std::nearbyintf(std::min(127.0f, std::max(-127.0f, load(x[i]) * inverse)))) : int8_t(0);
  return largest <= 3.4e38f ? largest / 127.0f : NAN;
}

template <typename T>
void store(Pages pages, const T* kv, int64_t frame_stride, int64_t frames, const int32_t* table, int64_t start) {
  const int dim = pages.head_dim;
  const int64_t width = int64_t(pages.heads) * dim;
  for (int64_t i = 0; i < frames; ++i) {
    const int64_t slot = (start + i) % PAGE;
    const int32_t page = table[(start + i) / PAGE];
    const Half keys = half_of<T>(pages, page, false), values = half_of<T>(pages, page, true);
    for (int head = 0; head < pages.heads; ++head) {
      const T* k = kv + i * frame_stride + head * dim;
      keys.scales[head * PAGE + slot] = round_head(k, dim, keys.numbers + int64_t(head) * dim * PAGE + slot, PAGE);
      values.scales[head * PAGE + slot] =
          round_head(k + width, dim, values.numbers + (int64_t(head) * PAGE + slot) * dim, 1);
    }
  }
}

// Ask for cache lines, to be there a page later: tables lead where the processor's own prefetcher does not see.
inline void expect(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// Arrays that a loop indexes do not stay in registers.
#define ASR_SERVE_UNROLL _Pragma("GCC unroll 8")

constexpr int64_t WHOLE_ROWS = 8;    // rows from which one is a piece of work
constexpr int PARTS = PAGE / LANES;  // vectors of the scores of a page
constexpr int MOST_VECTORS = 4;      // of a head's values that are summed at a time

// scores[t] = query . K[:, t] * scales[t] for the PAGE positions of one page. Four sums, for one would make every product
// wait for the one before.
inline void page_scores(const float* query, const int8_t* k, const float* scales, int dim, float* scores) {
  Vec sums[4][PARTS];
  ASR_SERVE_UNROLL for (int i = 0; i < 4; ++i) ASR_SERVE_UNROLL for (int p = 0; p < PARTS; ++p) sums[i][p] = Vec{};
  int d = 0;
  for (; d + 4 <= dim; d += 4)
    ASR_SERVE_UNROLL for (int i = 0; i < 4; ++i) ASR_SERVE_UNROLL for (int p = 0; p < PARTS; ++p)
        sums[i][p] += query[d + i] * load_vec(k + (d + i) * PAGE + p * LANES);
  for (; d < dim; ++d)
    ASR_SERVE_UNROLL for (int p = 0; p < PARTS; ++p) sums[0][p] += query[d] * load_vec(k + d * PAGE + p * LANES);
  ASR_SERVE_UNROLL for (int p = 0; p < PARTS; ++p) {
    const Vec sum = ((sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p])) * load_vec(scales + p * LANES);
    std::memcpy(scores + p * LANES, &sum, sizeof sum);
  }
}

// total += weights . V over the first `filled` positions of one page, for V vectors of a head. The last of them may read
// past a head: numbers of the next, or the scales. `total` has room for whole vectors.
template <int V>
inline void sum_values(const float* weights, const int8_t* v, int dim, int filled, float* total) {
  Vec even[V], odd[V];
  ASR_SERVE_UNROLL for (int i = 0; i < V; ++i) even[i] = load_vec(total + i * LANES), odd[i] = Vec{};
  int t = 0;
  for (; t + 2 <= filled; t += 2)
    ASR_SERVE_UNROLL for (int i = 0; i < V; ++i) {
      even[i] += weights[t] * load_vec(v + t * dim + i * LANES);
      odd[i] += weights[t + 1] * load_vec(v + (t + 1) * dim + i * LANES);
    }
  if (t < filled) ASR_SERVE_UNROLL for (int i = 0; i < V; ++i) even[i] += weights[t] * load_vec(v + t * dim + i * LANES);
  ASR_SERVE_UNROLL for (int i = 0; i < V; ++i) {
    const Vec sum = even[i] + odd[i];
    std::memcpy(total + i * LANES, &sum, sizeof sum);
  }
}

inline void page_values(const float* weights, const int8_t* v, int dim, int filled, float* total) {
  for (int vectors = (dim + LANES - 1) / LANES; vectors > 0; vectors -= MOST_VECTORS) {
    switch (std::min(vectors, MOST_VECTORS)) {
      case 4: sum_values<4>(weights, v, dim, filled, total); break;
      case 3: sum_values<3>(weights, v, dim, filled, total); break;
      case 2: sum_values<2>(weights, v, dim, filled, total); break;
      case 1: sum_values<1>(weights, v, dim, filled, total); break;
    }
    v += MOST_VECTORS * LANES, total += MOST_VECTORS * LANES;
  }
}

// One query, heads first .. first + count.
template <typename T>
void attend_heads(const Pages& pages, const T* q, T* out, const int32_t* table, int64_t length, int first, int count,
                  float scale, float* scratch) {
  const int dim = pages.head_dim, padded = (dim + LANES - 1) / LANES * LANES;
  const int64_t size = int64_t(dim) * PAGE, end = (length + PAGE - 1) / PAGE, stride = end * PAGE;
  float *scores = scratch, *queries = scores + count * stride, *totals = queries + count * dim;
  q += int64_t(first) * dim, out += int64_t(first) * dim;
  for (int i = 0; i < count * dim; ++i) queries[i] = load(q[i]);
  std::fill(totals, totals + count * padded, 0.0f);
  // Head by head, beside the arithmetic: more lines at once than the processor waits for are asked for in vain.
  auto ask = [&](const Half& half, int head) {
    expect(half.numbers + (first + head) * size, size);
    expect(half.scales + (first + head) * PAGE, PAGE * int64_t(sizeof(float)));
  };
  const Half first_values = half_of<T>(pages, table[0], true);
  for (int64_t page = 0; page < end; ++page) {
    const Half keys = half_of<T>(pages, table[page], false);
    const Half next = page + 1 < end ? half_of<T>(pages, table[page + 1], false) : first_values;
    for (int head = 0; head < count; ++head) {
      ask(next, head);
      page_scores(queries + head * dim, keys.numbers + (first + head) * size, keys.scales + (first + head) * PAGE, dim,
                  scores + head * stride + page * PAGE);
    }
  }
  for (int head = 0; head < count; ++head) softmax_floats(scores + head * stride, length, scale);
  for (int64_t page = 0; page < end; ++page) {
    const Half values = half_of<T>(pages, table[page], true);
    const Half next = half_of<T>(pages, table[std::min(page + 1, end - 1)], true);
    const int filled = int(std::min<int64_t>(PAGE, length - page * PAGE));
    for (int head = 0; head < count; ++head) {
      ask(next, head);
      float weights[PAGE];
      const float *from = scores + head * stride + page * PAGE, *scales = values.scales + (first + head) * PAGE;
      for (int t = 0; t < PAGE; ++t) weights[t] = from[t] * scales[t];
      page_values(weights, values.numbers + (first + head) * size, dim, filled, totals + head * padded);
    }
  }
  for (int head = 0; head < count; ++head)
    for (int d = 0; d < dim; ++d) save(out + head * dim + d, totals[head * padded + d]);
}

template <typename T>
void attend(Pages pages, const T* q, int64_t q_stride, T* out, const int32_t* tables, int64_t table_stride,
            const int64_t* lengths, int64_t rows, float scale, ParallelFor parallel) {
  const int64_t width = int64_t(pages.heads) * pages.head_dim;
  // Few rows are shared out by half their heads. The heads of a page lie side by side: more rows read them together.
  const int pieces = rows < WHOLE_ROWS && pages.heads % 2 == 0 ? 2 : 1;
  const int count = pages.heads / pieces;
  auto one = [&](int64_t item) {
    thread_local std::vector<float> scratch;
    const int64_t row = item / pieces, length = lengths[row], padded = (length + PAGE - 1) / PAGE * PAGE;
    scratch.resize(size_t(count * (padded + 2 * pages.head_dim + LANES)));
    attend_heads(pages, q + row * q_stride, out + row * width, tables + row * table_stride, length,
                 int(item % pieces) * count, count, scale, scratch.data());
  };
  run(rows * pieces, parallel, one);
}

}  // namespace

extern const Int8PageKernels<float> int8_pages_f32 = {store<float>, attend<float>};
extern const Int8PageKernels<bf16> int8_pages_bf16 = {store<bf16>, attend<bf16>};

}  // namespace asr_serve::ASR_SERVE_ISA
