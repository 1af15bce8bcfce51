#include "decoder_layers.h"

#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <unordered_map>

namespace asr_serve {
namespace {

// Rows for each thread from which threads go through all layers on their own: with fewer, each of them would read all
// weights for little.
constexpr int64_t OWN_ROWS = 4;
// What a row costs beside its cross-attention, in frames of audio that take as long to read.
constexpr int64_t ROW_FRAMES = 96;

void serial(int64_t items, Body body, void* context) {
  for (int64_t item = 0; item < items; ++item) body(context, item);
}

// A row whose pages are page 0 fills a batch, and nobody reads what becomes of it. Such rows come last.
int64_t live_rows(const DecoderInputs& inputs) {
  int64_t rows = inputs.rows;
  while (rows > 0 && inputs.own_tables[(rows - 1) * inputs.own_table_stride] == 0) --rows;
  return rows;
}

// For each row the last one that it must stay together with: one of the two reads or writes a page that the other
// writes in this inputs. Such rows are positions of one sequence.
std::vector<int64_t> last_dependents(const DecoderInputs& inputs, int64_t rows) {
  auto page = [&](int64_t row, int64_t at) { return inputs.own_tables[row * inputs.own_table_stride + at]; };
  auto last = [&](int64_t row) { return (inputs.own_lengths[row] - 1) / PAGE; };
  std::unordered_map<int32_t, int64_t> writers;
  for (int64_t row = 0; row < rows; ++row) writers.emplace(page(row, last(row)), row);
  std::vector<int64_t> dependents;
  for (int64_t row = 0; row < rows; ++row) dependents.push_back(row);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t at = 0; at <= last(row); ++at) {
      const auto writer = writers.find(page(row, at));
      if (writer == writers.end()) continue;
      int64_t& dependent = dependents[size_t(std::min(row, writer->second))];
      dependent = std::max({dependent, row, writer->second});
    }
  return dependents;
}

template <typename T>
class ForwardPass {
 public:
  ForwardPass(const DecoderInputs& inputs, const DecoderLayerKernels<T>& kernels, ParallelFor parallel)
      : inputs_(inputs), kernels_(kernels), parallel_(parallel) {}

  // Rows first .. first + count through all layers.
  void run(T* x, const std::vector<T*>& queries, int64_t first, int64_t count) {
    const int64_t inner = int64_t(inputs_.heads) * inputs_.head_dim;
    x += first * inputs_.width;
    thread_local std::vector<T> numbers;
    thread_local std::vector<int64_t> positions;
    int64_t middle = 0;
    for (const DecoderLayer& layer : *inputs_.layers) middle = std::max(middle, layer.up.outputs);
    numbers.resize(size_t(count * (inputs_.width + 5 * inner + 2 * middle)));
    T *normed = numbers.data(), *qkv = normed + count * inputs_.width, *unreturned = qkv + count * 3 * inner,
      *mixed = unreturned + count * inner, *up = mixed + count * inner, *gated = up + count * middle;
    positions.resize(size_t(count));
    for (int64_t row = 0; row < count; ++row) positions[size_t(row)] = inputs_.own_lengths[first + row] - 1;
    for (size_t i = 0; i < inputs_.layers->size(); ++i) {
      const DecoderLayer& layer = (*inputs_.layers)[i];
      Pages own = inputs_.own, audio = inputs_.audio;
      own.layer_offset += int64_t(i) * inputs_.own_layer_stride;
      audio.layer_offset += int64_t(i) * inputs_.audio_layer_stride;
      normalize(layer.own_norm, x, normed, count);
      multiply(layer.qkv, normed, qkv, nullptr, count, false);
      if (inputs_.cos)
        kernels_.numbers.rope(qkv, positions.data(), inputs_.cos, inputs_.sin, count, inputs_.heads, inputs_.head_dim,
                              inputs_.half, parallel_);
      const int32_t* tables = inputs_.own_tables + first * inputs_.own_table_stride;
      for (int64_t row = 0; row < count; ++row)
        kernels_.numbers.store(own, qkv + (row * 3 + 1) * inner, 3 * inner, 1, tables + row * inputs_.own_table_stride,
                               positions[size_t(row)]);
      kernels_.numbers.attend(own, qkv, 3 * inner, mixed, tables, inputs_.own_table_stride, inputs_.own_lengths + first,
                              count, 1, 0, inputs_.scale, parallel_);
      multiply(layer.own_out, mixed, x, x, count, false);
      normalize(layer.cross_norm, x, normed, count);
      T* query = queries[i] ? queries[i] + first * inner : unreturned;
      multiply(layer.query, normed, query, nullptr, count, false);
      const int32_t* audio_tables = inputs_.audio_tables + first * inputs_.audio_table_stride;
      if (inputs_.int8_audio)
        kernels_.int8_pages.attend(audio, query, inner, mixed, audio_tables, inputs_.audio_table_stride,
                                   inputs_.audio_lengths + first, count, inputs_.scale, parallel_);
      else
        kernels_.numbers.attend(audio, query, inner, mixed, audio_tables, inputs_.audio_table_stride,
                                inputs_.audio_lengths + first, count, 1, 0, inputs_.scale, parallel_);
      multiply(layer.cross_out, mixed, x, x, count, false);
      normalize(layer.feed_norm, x, normed, count);
      multiply(layer.up, normed, up, nullptr, count, !inputs_.gated);
      if (inputs_.gated) {
        const int64_t half = layer.up.outputs / 2;
        kernels_.rows.gate(up + half, up, layer.up.outputs, gated, count, half, Activation::silu, parallel_);
      }
      multiply(layer.down, inputs_.gated ? gated : up, x, x, count, false);
    }
  }

 private:
  void normalize(const DecoderNorm& norm, const T* x, T* out, int64_t rows) {
    kernels_.rows.layer_norm(x, norm.weight, norm.bias, out, rows, inputs_.width, inputs_.eps, parallel_);
  }

  void multiply(const DecoderProduct& product, const T* x, T* out, const T* add, int64_t rows, bool gelu) {
    constexpr bool rounded = std::is_same_v<T, bf16>;
    if (product.bits) {
      kernels_.int8.product({product.int8, x, out, add, rounded, rounded, rows, product.bits, gelu}, parallel_);
      return;
    }
    Bf16Product call = product.bf16;
    call.x = reinterpret_cast<const uint16_t*>(x), call.add = reinterpret_cast<const uint16_t*>(add);
    call.out = out, call.rows = rows;
    product.multiply(call, parallel_);
    if (gelu) kernels_.rows.gelu(out, rows, product.outputs, parallel_);
  }

  const DecoderInputs& inputs_;
  const DecoderLayerKernels<T>& kernels_;
  ParallelFor parallel_;
};

// Ends of up to `parts` runs of rows that take about as long and do not depend on each other; of one run with all rows
// where the longest would take most of the time.
std::vector<int64_t> split_rows(const DecoderInputs& inputs, int64_t rows, unsigned parts) {
  const std::vector<int64_t> dependents = last_dependents(inputs, rows);
  std::vector<int64_t> ends, costs;  // of every run from the first row that may end there
  int64_t total = 0, together = 0;
  for (int64_t row = 0; row < rows; ++row) {
    total += ROW_FRAMES + inputs.audio_lengths[row];
    together = std::max(together, dependents[size_t(row)]);
    if (together == row) ends.push_back(row + 1), costs.push_back(total);
  }
  std::vector<int64_t> chosen;
  int64_t longest = 0, before = 0;
  for (int64_t part = 1; part <= parts; ++part) {
    auto distance = [&](int64_t cost) { return std::abs(cost * int64_t(parts) - total * part); };
    const auto nearest = std::min_element(costs.begin(), costs.end(),
                                          [&](int64_t a, int64_t b) { return distance(a) < distance(b); });
    if (*nearest == before) continue;
    chosen.push_back(ends[size_t(nearest - costs.begin())]);
    longest = std::max(longest, *nearest - before);
    before = *nearest;
  }
  if (longest * int64_t(parts) > total * 3 / 2) return {rows};
  return chosen;
}

}  // namespace

template <typename T>
void run_decoder_layers(const DecoderInputs& inputs, const DecoderLayerKernels<T>& kernels, T* x,
                        const std::vector<T*>& queries, unsigned threads, ParallelFor parallel) {
  const int64_t rows = live_rows(inputs);
  if (!rows) return;
  // Every thread takes rows of its own through all layers: none waits for another before the end, and while one reads
  // keys and values another multiplies.
  const bool enough = threads > 1 && rows >= OWN_ROWS * int64_t(threads);
  const std::vector<int64_t> ends = enough ? split_rows(inputs, rows, threads) : std::vector<int64_t>{rows};
  if (ends.size() < 2) {
    ForwardPass<T>(inputs, kernels, parallel).run(x, queries, 0, rows);
    return;
  }
  auto part = [&](int64_t item) {
    const int64_t first = item ? ends[size_t(item - 1)] : 0;
    ForwardPass<T>(inputs, kernels, serial).run(x, queries, first, ends[size_t(item)] - first);
  };
  parallel(int64_t(ends.size()), [](void* context, int64_t item) { (*static_cast<decltype(part)*>(context))(item); },
           &part);
}

template void run_decoder_layers<float>(const DecoderInputs&, const DecoderLayerKernels<float>&, float*,
                                        const std::vector<float*>&, unsigned, ParallelFor);
template void run_decoder_layers<bf16>(const DecoderInputs&, const DecoderLayerKernels<bf16>&, bf16*,
                                       const std::vector<bf16*>&, unsigned, ParallelFor);

}  // namespace asr_serve
