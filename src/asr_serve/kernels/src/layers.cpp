// Compiled once per instruction set (see CMakeLists.txt). A number is one sum over its inputs in their order, whatever
// rows are computed beside it.
#include "layers.h"

#include <algorithm>
#include <utility>

#include "floats.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, BREADTH = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, BREADTH = 2;
#else
constexpr int LANES = 4, BREADTH = 2;
#endif
// Rows by BREADTH vectors of sums fill the registers.
constexpr int ROWS = 6;
// Rows that share a stay of some columns of the weight in the cache.
constexpr int64_t STRIPE = 96;
// Multiplications of a product, 100 us of one core, from which threads are worth waking.
constexpr int64_t SHARED = 1 << 23;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Vec load_vec(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline Vec load_vec(const bf16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof(x));
  return (Vec)(__builtin_convertvector(x, Words) << 16);
}

// Numbers of one row that lie together.
struct Part {
  int64_t width;
  std::vector<const float*> rows;
};

template <typename W>
struct Product {
  const std::vector<Part>* parts;
  const W* weight;
  const float* bias;  // of whole vectors
  int64_t inputs, outputs;
  bool relu;
  float* out;
};

template <int R, int V, typename W>
void multiply(const Product<W>& product, int64_t row, int64_t column) {
  Vec sums[R][V];
  const W* weight[V];
  for (int v = 0; v < V; ++v) {
    int64_t first = column + v * LANES;
    weight[v] = product.weight + first / LAYER_OUTPUTS * product.inputs * LAYER_OUTPUTS + first % LAYER_OUTPUTS;
    for (int r = 0; r < R; ++r) sums[r][v] = load_vec(product.bias + first);
  }
  for (const Part& part : *product.parts) {
    const float* x[R];
    for (int r = 0; r < R; ++r) x[r] = part.rows[size_t(row + r)];
    for (int64_t k = 0; k < part.width; ++k) {
      Vec w[V];
      for (int v = 0; v < V; ++v) {
        w[v] = load_vec(weight[v]);
        weight[v] += LAYER_OUTPUTS;
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] += x[r][k] * w[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      int64_t first = column + v * LANES;
      float each[LANES];
      std::memcpy(each, &sums[r][v], sizeof(each));
      if (product.relu)
        for (int i = 0; i < LANES; ++i) each[i] = each[i] < 0.0f ? 0.0f : each[i];  // NaN stays NaN
      int64_t count = std::min<int64_t>(LANES, product.outputs - first);
      if (count > 0) std::memcpy(product.out + (row + r) * product.outputs + first, each, size_t(count) * 4);
    }
}

template <int V, typename W>
void multiply_rows(const Product<W>& product, int64_t row, int64_t end, int64_t column) {
  for (; row + ROWS <= end; row += ROWS) multiply<ROWS, V>(product, row, column);
  switch (end - row) {
    case 5: return multiply<5, V>(product, row, column);
    case 4: return multiply<4, V>(product, row, column);
    case 3: return multiply<3, V>(product, row, column);
    case 2: return multiply<2, V>(product, row, column);
    case 1: return multiply<1, V>(product, row, column);
  }
}

template <typename W>
void multiply_all(const Product<W>& product, int64_t rows, ParallelFor parallel) {
  constexpr int64_t WIDE = BREADTH * LANES;
  int64_t padded = (product.outputs + LAYER_OUTPUTS - 1) / LAYER_OUTPUTS * LAYER_OUTPUTS;
  int64_t panels = (padded + WIDE - 1) / WIDE, stripes = (rows + STRIPE - 1) / STRIPE;
  auto one = [&](int64_t item) {
    int64_t column = item % panels * WIDE, row = item / panels * STRIPE, end = std::min(rows, row + STRIPE);
    int64_t last = std::min(padded, column + WIDE);
    if (column + WIDE == last) return multiply_rows<BREADTH>(product, row, end, column);
    for (; column < last; column += LANES) multiply_rows<1>(product, row, end, column);
  };
  if (rows * product.inputs * product.outputs >= SHARED)
    return run(panels * stripes, parallel, one);
  for (int64_t item = 0; item < panels * stripes; ++item) one(item);
}

template <typename T>
void load_history(const T* state, int64_t state_width, int64_t sessions, int64_t frames, int64_t width, float* to) {
  for (int64_t frame = 0; frame < frames; ++frame)
    for (int64_t session = 0; session < sessions; ++session) {
      const T* from = state + session * state_width + frame * width;
      float* row = to + (frame * sessions + session) * width;
      for (int64_t i = 0; i < width; ++i) row[i] = load(from[i]);
    }
}

template <typename T>
void save_history(T* state, int64_t state_width, int64_t sessions, int64_t frames, int64_t width, const float* from) {
  for (int64_t frame = 0; frame < frames; ++frame)
    for (int64_t session = 0; session < sessions; ++session) {
      T* to = state + session * state_width + frame * width;
      const float* row = from + (frame * sessions + session) * width;
      for (int64_t i = 0; i < width; ++i) save(to + i, row[i]);
    }
}

template <typename T>
class Run {
 public:
  Run(const LayersCall& call, ParallelFor parallel) : call_(call), parallel_(parallel) {}

  void layers() {
    const auto& layers = *call_.layers;
    values_.resize(layers.size() + 1);
    values_[0] = {call_.frames, call_.input_history + call_.block_frames, call_.input_width};
    std::vector<std::vector<float>> memory(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& layer = layers[i];
      if (call_.prime && !layer.primed) continue;
      const int64_t count = call_.block_frames / layer.stride, history = layer.history * call_.sessions * layer.width;
      float* whole = call_.out;
      if (i + 1 < layers.size() || call_.prime) {
        memory[i] = take(size_t(history + count * call_.sessions * layer.width));
        whole = memory[i].data();
      }
      T* state = static_cast<T*>(call_.state) + layer.state;
      load_history(state, call_.state_width, call_.sessions, layer.history, layer.width, whole);
      if (layer.scales.empty())
        product(layer, count, whole + history);
      else
        sum(layer, count, whole + history);
      save_history(state, call_.state_width, call_.sessions, layer.history, layer.width,
                   whole + count * call_.sessions * layer.width);
      values_[i + 1] = {whole, layer.history + count, layer.width};
      for (size_t j = 0; j <= i; ++j)
        if (layers[j].last_reader == int64_t(i)) give(memory[j]);
    }
    for (auto& each : memory) give(each);
  }

 private:
  struct Values {
    const float* data;
    int64_t frames, width;
  };

  // Memory of layers that nobody reads any more. It outlives a step: fresh pages cost more than what is written there.
  static std::vector<std::vector<float>>& unused() {
    thread_local std::vector<std::vector<float>> memory;
    return memory;
  }

  static std::vector<float> take(size_t size) {
    std::vector<float> found;
    if (!unused().empty()) {
      found = std::move(unused().back());
      unused().pop_back();
    }
    if (found.size() < size) found.resize(size);
    return found;
  }

  static void give(std::vector<float>& memory) {
    if (!memory.empty()) unused().push_back(std::move(memory));
    memory.clear();
  }

  // The row of frame `i` of `count`, of the first session.
  const float* row(const LayerRead& read, int64_t i, int64_t count) const {
    const Values& from = values_[size_t(read.source)];
    int64_t frame = from.frames - read.lag - 1 - (count - 1 - i) * read.step;
    return from.data + frame * call_.sessions * from.width;
  }

  void product(const Layer& layer, int64_t count, float* out) {
    std::vector<Part> parts;
    int64_t inputs = 0;
    for (const LayerRead& read : layer.reads) {
      Part part{values_[size_t(read.source)].width, {}};
      for (int64_t i = 0; i < count; ++i)
        for (int64_t session = 0; session < call_.sessions; ++session)
          part.rows.push_back(row(read, i, count) + session * part.width);
      inputs += part.width;
      parts.push_back(std::move(part));
    }
    if (layer.ivector) {
      Part part{call_.ivector_width, {}};
      const int64_t newest = call_.block_frames - call_.subsampling + layer.ahead;
      const int64_t boundary = newest / call_.block_frames * call_.block_frames;
      for (int64_t i = 0; i < count; ++i) {
        bool early = newest - (count - 1 - i) * layer.stride < boundary;
        for (int64_t session = 0; session < call_.sessions; ++session)
          part.rows.push_back((early ? call_.before : call_.after) + session * part.width);
      }
      inputs += part.width;
      parts.push_back(std::move(part));
    }
    const int64_t rows = count * call_.sessions;
    if (layer.rounded)
      multiply_all(Product<bf16>{&parts, static_cast<const bf16*>(layer.weight), layer.bias, inputs, layer.width,
                                 layer.relu, out}, rows, parallel_);
    else
      multiply_all(Product<float>{&parts, static_cast<const float*>(layer.weight), layer.bias, inputs, layer.width,
                                  layer.relu, out}, rows, parallel_);
  }

  void sum(const Layer& layer, int64_t count, float* out) {
    const int64_t numbers = call_.sessions * layer.width;
    for (int64_t i = 0; i < count; ++i, out += numbers) {
      const float *first = row(layer.reads[0], i, count), scale = layer.scales[0];
      if (layer.reads.size() == 2) {
        const float *second = row(layer.reads[1], i, count), other = layer.scales[1];
        for (int64_t j = 0; j < numbers; ++j) out[j] = scale * first[j] + other * second[j];
      } else {
        for (int64_t j = 0; j < numbers; ++j) out[j] = scale * first[j];
        for (size_t r = 1; r < layer.reads.size(); ++r) {
          const float *more = row(layer.reads[r], i, count), other = layer.scales[r];
          for (int64_t j = 0; j < numbers; ++j) out[j] += other * more[j];
        }
      }
      if (layer.relu)
        for (int64_t j = 0; j < numbers; ++j) out[j] = out[j] < 0.0f ? 0.0f : out[j];
    }
  }

  const LayersCall& call_;
  ParallelFor parallel_;
  std::vector<Values> values_;
};

void run_all(const LayersCall& call, ParallelFor parallel) {
  if (call.state_rounded)
    Run<bf16>(call, parallel).layers();
  else
    Run<float>(call, parallel).layers();
}

}  // namespace

extern const RunLayers run_layers = run_all;

}  // namespace asr_serve::ASR_SERVE_ISA
