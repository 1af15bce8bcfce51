// Compiled once per instruction set (see CMakeLists.txt). A number is one sum over its inputs in their order, whatever
// rows are computed beside it.
#include "layers.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "floats.h"
#include "vectors.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

// Vectors of sums that a product keeps side by side for each row.
constexpr int BREADTH = LANES == 16 ? 4 : 2;
// Rows by BREADTH vectors of sums fill the registers.
constexpr int ROWS = 6;
// Rows that share a stay of some columns of the weight in the cache.
constexpr int64_t STRIPE = 96;
// Multiplications of a product, 100 us of one core, from which threads are worth waking.
constexpr int64_t SHARED = 1 << 23;

// Numbers of one row that lie together.
struct Part {
  int64_t width;
  std::vector<const void*> rows;
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
    for (int r = 0; r < R; ++r) x[r] = static_cast<const float*>(part.rows[size_t(row + r)]);
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

inline void copy(float* to, float from) { *to = from; }
inline void copy(float* to, bf16 from) { *to = load(from); }
inline void copy(bf16* to, float from) { save(to, from); }
inline void copy(bf16* to, bf16 from) { *to = from; }

template <typename T, typename V>
void load_history(const T* state, int64_t state_width, int64_t sessions, int64_t frames, int64_t width, V* to) {
  for (int64_t frame = 0; frame < frames; ++frame)
    for (int64_t session = 0; session < sessions; ++session) {
      const T* from = state + session * state_width + frame * width;
      V* row = to + (frame * sessions + session) * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) copy(row + i, from[i]);
    }
}

template <typename T, typename V>
void save_history(T* state, int64_t state_width, int64_t sessions, int64_t frames, int64_t width, const V* from) {
  for (int64_t frame = 0; frame < frames; ++frame)
    for (int64_t session = 0; session < sessions; ++session) {
      T* to = state + session * state_width + frame * width;
      const V* row = from + (frame * sessions + session) * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) copy(to + i, row[i]);
    }
}

// State and scores in T, frames of layers in V: float, or bf16 with tiles.
template <typename T, typename V>
class Run {
 public:
  Run(const LayersCall& call, ParallelFor parallel) : call_(call), parallel_(parallel) {}

  void layers() {
    const auto& layers = *call_.layers;
    values_.resize(layers.size() + 1);
    values_[0] = {call_.frames, call_.input_history + call_.block_frames, call_.input_width};
    std::vector<std::vector<V>> memory(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& layer = layers[i];
      if (call_.prime && !layer.primed) continue;
      const int64_t count = call_.block_frames / layer.stride, history = layer.history * call_.sessions * layer.width;
      memory[i] = take(size_t(history + count * call_.sessions * layer.width));
      V* whole = memory[i].data();
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
    if (!call_.prime) {
      T* out = static_cast<T*>(call_.out);
      const V* scores = memory.back().data();
      const int64_t numbers = call_.block_frames / layers.back().stride * call_.sessions * layers.back().width;
#pragma omp simd
      for (int64_t i = 0; i < numbers; ++i) copy(out + i, scores[i]);
    }
    for (auto& each : memory) give(each);
  }

 private:
  struct Values {
    const void* data;
    int64_t frames, width;
  };

  // Memory of layers that nobody reads any more. It outlives a step: fresh pages cost more than what is written there.
  static std::vector<std::vector<V>>& unused() {
    thread_local std::vector<std::vector<V>> memory;
    return memory;
  }

  static std::vector<V> take(size_t size) {
    std::vector<V> found;
    if (!unused().empty()) {
      found = std::move(unused().back());
      unused().pop_back();
    }
    if (found.size() < size) found.resize(size);
    return found;
  }

  static void give(std::vector<V>& memory) {
    if (!memory.empty()) unused().push_back(std::move(memory));
    memory.clear();
  }

  // Where the numbers of frame `i` of `count` begin.
  int64_t start(const LayerRead& read, int64_t i, int64_t count) const {
    const Values& from = values_[size_t(read.source)];
    int64_t frame = from.frames - read.lag - 1 - (count - 1 - i) * read.step;
    return frame * call_.sessions * from.width;
  }

  const V* row(const LayerRead& read, int64_t i, int64_t count) const {
    return static_cast<const V*>(values_[size_t(read.source)].data) + start(read, i, count);
  }

  void product(const Layer& layer, int64_t count, V* out) {
    std::vector<Part> parts;
    int64_t inputs = 0;
    for (const LayerRead& read : layer.reads) {
      const Values& from = values_[size_t(read.source)];
      Part part{from.width, {}};
      part.rows.reserve(size_t(count * call_.sessions));
      const int64_t bytes = read.source ? sizeof(V) : sizeof(float);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t session = 0; session < call_.sessions; ++session)
          part.rows.push_back(static_cast<const char*>(from.data) +
                              (start(read, i, count) + session * part.width) * bytes);
      inputs += part.width;
      parts.push_back(std::move(part));
    }
    if (layer.ivector) {
      Part part{call_.ivector_width, {}};
      const int64_t newest = call_.block_frames - call_.subsampling + layer.ahead;
      const int64_t past = newest % call_.block_frames;  // below 0 for a layer far behind the output
      const int64_t boundary = newest - past - (past < 0 ? call_.block_frames : 0);
      for (int64_t i = 0; i < count; ++i) {
        bool early = newest - (count - 1 - i) * layer.stride < boundary;
        for (int64_t session = 0; session < call_.sessions; ++session)
          part.rows.push_back((early ? call_.before : call_.after) + session * part.width);
      }
      inputs += part.width;
      parts.push_back(std::move(part));
    }
    const int64_t rows = count * call_.sessions;
    if (layer.tiled) return multiply_tiles(layer, parts, rows, out);
    float* sums;
    if constexpr (std::is_same_v<V, float>) {
      sums = out;
    } else {
      exact_.resize(size_t(rows * layer.width));
      sums = exact_.data();
    }
    if (layer.rounded)
      multiply_all(Product<bf16>{&parts, static_cast<const bf16*>(layer.weight), layer.bias, inputs, layer.width,
                                 layer.relu, sums}, rows, parallel_);
    else
      multiply_all(Product<float>{&parts, static_cast<const float*>(layer.weight), layer.bias, inputs, layer.width,
                                  layer.relu, sums}, rows, parallel_);
    if constexpr (!std::is_same_v<V, float>) {
#pragma omp simd
      for (int64_t i = 0; i < rows * layer.width; ++i) copy(out + i, sums[i]);
    }
  }

  void multiply_tiles(const Layer& layer, const std::vector<Part>& parts, int64_t rows, V* out) {
    std::vector<int64_t> widths;
    std::vector<const void* const*> starts;
    for (const Part& part : parts) {
      widths.push_back(part.width);
      starts.push_back(part.rows.data());
    }
    call_.tiles({rows, layer.width, parts.size(), widths.data(), starts.data(), layer.weight, layer.bias, layer.relu,
                 reinterpret_cast<uint16_t*>(out)},
                rows * layer.width * 256 >= SHARED ? parallel_ : alone);
  }

  static void alone(int64_t items, Body body, void* context) {
    for (int64_t item = 0; item < items; ++item) body(context, item);
  }

  void sum(const Layer& layer, int64_t count, V* out) {
    const int64_t numbers = call_.sessions * layer.width;
    for (int64_t i = 0; i < count; ++i, out += numbers) {
      const V* first = row(layer.reads[0], i, count);
      const float scale = layer.scales[0];
      if (layer.reads.size() == 2) {
        const V* second = row(layer.reads[1], i, count);
        const float other = layer.scales[1];
#pragma omp simd
        for (int64_t j = 0; j < numbers; ++j) save(out + j, scale * load(first[j]) + other * load(second[j]));
      } else {
        for (int64_t j = 0; j < numbers; ++j) save(out + j, scale * load(first[j]));
        for (size_t r = 1; r < layer.reads.size(); ++r) {
          const V* more = row(layer.reads[r], i, count);
          const float other = layer.scales[r];
          for (int64_t j = 0; j < numbers; ++j) save(out + j, load(out[j]) + other * load(more[j]));
        }
      }
      if (layer.relu)
        for (int64_t j = 0; j < numbers; ++j) save(out + j, load(out[j]) < 0.0f ? 0.0f : load(out[j]));
    }
  }

  const LayersCall& call_;
  ParallelFor parallel_;
  std::vector<Values> values_;
  std::vector<float> exact_;  // sums of a layer before they are rounded
};

void run_all(const LayersCall& call, ParallelFor parallel) {
  if (call.tiles)
    Run<bf16, bf16>(call, parallel).layers();
  else if (call.state_rounded)
    Run<bf16, float>(call, parallel).layers();
  else
    Run<float, float>(call, parallel).layers();
}

}  // namespace

extern const RunLayers run_layers = run_all;

}  // namespace asr_serve::ASR_SERVE_ISA
