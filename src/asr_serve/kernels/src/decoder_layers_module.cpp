#include "decoder_layers_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bf16_module.h"
#include "decoder_layers.h"
#include "int8_module.h"
#include "torch_numbers.h"

namespace asr_serve {
namespace {

ChosenKernels kernels{};
unsigned (*count_threads)() = nullptr;
ParallelFor threads = nullptr;

using Vector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tensor = nb::ndarray<nb::device::cpu>;
using Norm = std::tuple<Vector, std::optional<Vector>>;
using Product = std::tuple<nb::object, int>;

bool is_bf16(const Tensor& x) {
  if (x.dtype() == nb::dtype<float>()) return false;
  require(x.dtype().code == uint8_t(nb::dlpack::dtype_code::Bfloat) && x.dtype().bits == 16,
          "dtype must be float32 or bfloat16");
  return true;
}

bool is_matrix(const Tensor& x, int64_t rows, int64_t columns) {
  return x.ndim() == 2 && int64_t(x.shape(0)) == rows && int64_t(x.shape(1)) == columns && x.stride(1) == 1 &&
         (rows < 2 || x.stride(0) == columns);
}

class DecoderLayers {
 public:
  DecoderLayers(int64_t width, int heads, int head_dim, float scale, float eps, std::optional<Matrix> cos,
                std::optional<Matrix> sin, bool gated)
      : cos_(cos), sin_(sin) {
    require(width > 0 && heads > 0 && head_dim > 0 && head_dim <= 512, "width, heads and head_dim are above 0");
    require(bool(cos) == bool(sin), "cos and sin go together");
    require(!cos || (cos->shape(0) == sin->shape(0) && cos->shape(1) == sin->shape(1) &&
                     2 * int64_t(cos->shape(1)) <= head_dim),
            "cos, sin must be (positions, half)");
    inputs_.width = width, inputs_.heads = heads, inputs_.head_dim = head_dim, inputs_.scale = scale, inputs_.eps = eps;
    inputs_.gated = gated;
    if (cos) inputs_.cos = cos->data(), inputs_.sin = sin->data(), inputs_.half = int(cos->shape(1));
  }

  void add(const Norm& own_norm, const Product& qkv, const Product& own_out, const Norm& cross_norm, const Product& query,
           const Product& cross_out, const Norm& feed_norm, const Product& up, const Product& down) {
    const int64_t width = inputs_.width, inner = int64_t(inputs_.heads) * inputs_.head_dim;
    DecoderLayer layer{};
    layer.own_norm = norm(own_norm), layer.cross_norm = norm(cross_norm), layer.feed_norm = norm(feed_norm);
    layer.qkv = product(qkv, width, 3 * inner), layer.own_out = product(own_out, inner, width);
    layer.query = product(query, width, inner), layer.cross_out = product(cross_out, inner, width);
    layer.up = product(up, width, 0);
    require(!inputs_.gated || layer.up.outputs % 2 == 0, "a gated layer has as many gates as counterparts");
    layer.down = product(down, inputs_.gated ? layer.up.outputs / 2 : layer.up.outputs, width);
    layers_.push_back(layer);
  }

  void run(Tensor x, Tensor pool, Tables own_tables, Lengths own_lengths, Tensor audio_pool, Tables audio_tables,
           Lengths audio_lengths, bool int8_audio, const std::vector<std::tuple<int64_t, Tensor>>& queries) const {
    DecoderInputs inputs = inputs_;
    inputs.layers = &layers_, inputs.rows = x.ndim() ? int64_t(x.shape(0)) : 0;
    const int64_t inner = int64_t(inputs.heads) * inputs.head_dim;
    require(is_matrix(x, inputs.rows, inputs.width), "x must be (rows, width), contiguous");
    const bool rounded = is_bf16(x);
    for (const DecoderLayer& layer : layers_)
      for (const DecoderProduct* each : {&layer.qkv, &layer.own_out, &layer.query, &layer.cross_out, &layer.up, &layer.down})
        require(rounded || each->bits, "products of bf16 take bfloat16");
    inputs.own = pages(pool, x), inputs.audio = pages(audio_pool, x);
    inputs.own_layer_stride = pool.stride(1), inputs.audio_layer_stride = audio_pool.stride(1);
    check(inputs.rows, pool, own_tables, own_lengths);
    check(inputs.rows, audio_pool, audio_tables, audio_lengths);
    if (inputs.cos)
      for (int64_t row = 0; row < inputs.rows; ++row)
        require(own_lengths.data()[row] <= int64_t(cos_->shape(0)), "position out of range");
    require(!int8_audio || inputs.head_dim >= 4, "heads of 8-bit pages have 4 numbers or more");
    inputs.int8_audio = int8_audio;
    inputs.own_tables = own_tables.data(), inputs.own_table_stride = int64_t(own_tables.shape(1));
    inputs.audio_tables = audio_tables.data(), inputs.audio_table_stride = int64_t(audio_tables.shape(1));
    inputs.own_lengths = own_lengths.data(), inputs.audio_lengths = audio_lengths.data();
    std::vector<void*> wanted(layers_.size(), nullptr);
    for (const auto& [layer, query] : queries) {
      require(layer >= 0 && layer < int64_t(layers_.size()), "layer out of range");
      require(query.dtype() == x.dtype() && is_matrix(query, inputs.rows, inner),
              "a layer's queries must be (rows, heads * head_dim), contiguous, of the dtype of x");
      wanted[size_t(layer)] = query.data();
    }
    nb::gil_scoped_release release;
    if (rounded)
      call<bf16>(inputs, {**kernels.b16, **kernels.decoder_b16, **kernels.int8_pages_b16, int8_kernels()}, x.data(), wanted);
    else
      call<float>(inputs, {**kernels.f32, **kernels.decoder_f32, **kernels.int8_pages_f32, int8_kernels()}, x.data(), wanted);
  }

 private:
  template <typename T>
  static void call(const DecoderInputs& inputs, const DecoderLayerKernels<T>& with, void* x,
                   const std::vector<void*>& wanted) {
    std::vector<T*> queries;
    for (void* query : wanted) queries.push_back(static_cast<T*>(query));
    run_decoder_layers<T>(inputs, with, static_cast<T*>(x), queries, count_threads(), threads);
  }

  DecoderNorm norm(const Norm& from) {
    const auto& [weight, bias] = from;
    require(int64_t(weight.size()) == inputs_.width && (!bias || int64_t(bias->size()) == inputs_.width),
            "a norm has a weight, and a bias if any, for each number of a row");
    norms_.push_back(from);
    return {weight.data(), bias ? bias->data() : nullptr};
  }

  // `outputs`: 0 for any number.
  DecoderProduct product(const Product& from, int64_t inputs, int64_t outputs) {
    const auto& [linear, bits] = from;
    require(bits == 0 || bits == 8 || bits == 16, "bits must be 8 or 16, or 0 for bf16");
    DecoderProduct made{};
    made.bits = bits;
    if (bits) {
      made.int8 = int8_weights(linear);
      require(!made.int8.norm.weight, "a product of a layer has no norm of its own: the layer has one before it");
      made.inputs = made.int8.in, made.outputs = made.int8.out;
    } else {
      made.bf16 = bf16_product(linear, made.multiply);
      require(made.bf16.activation == Activation::none, "a product of a layer has no gate of its own");
      made.inputs = made.bf16.inputs, made.outputs = made.bf16.outputs;
    }
    require(made.inputs == inputs && (!outputs || made.outputs == outputs), "the shapes of a layer's products differ");
    products_.push_back(linear);
    return made;
  }

  // pool (pages, layers, 2, heads, head_dim * PAGE)
  Pages pages(const Tensor& pool, const Tensor& x) const {
    require(pool.dtype() == x.dtype(), "x and pages must have one dtype");
    require(pool.ndim() == 5 && pool.shape(1) == layers_.size() && pool.shape(2) == 2 &&
                int(pool.shape(3)) == inputs_.heads && int64_t(pool.shape(4)) == int64_t(inputs_.head_dim) * PAGE &&
                pool.stride(4) == 1 && pool.stride(3) == int64_t(pool.shape(4)) &&
                pool.stride(2) == pool.stride(3) * inputs_.heads && pool.stride(1) == 2 * pool.stride(2),
            "pool must be (pages, layers, 2, heads, head_dim * 16)");
    return {pool.data(), pool.stride(0), 0, inputs_.heads, inputs_.head_dim};
  }

  static void check(int64_t rows, const Tensor& pool, const Tables& tables, const Lengths& lengths) {
    require(int64_t(tables.shape(0)) == rows && int64_t(lengths.size()) == rows, "one table and one length per row");
    const int64_t width = int64_t(tables.shape(1));
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t length = lengths.data()[row];
      require(length >= 1 && length <= width * PAGE, "length outside the table");
      for (int64_t i = 0; i < (length + PAGE - 1) / PAGE; ++i) {
        const int32_t page = tables.data()[row * width + i];
        require(page >= 0 && page < int64_t(pool.shape(0)), "page out of range");
      }
    }
  }

  std::optional<Matrix> cos_, sin_;
  std::vector<Norm> norms_;
  std::vector<nb::object> products_;
  std::vector<DecoderLayer> layers_;
  DecoderInputs inputs_{};
};

}  // namespace

void add_decoder_layers(nb::module_& m, const ChosenKernels& chosen, unsigned (*thread_count)(), ParallelFor parallel) {
  kernels = chosen, count_threads = thread_count, threads = parallel;
  nb::class_<DecoderLayers>(m, "DecoderLayers", "See devices/decoder_layers.py.")
      .def(nb::init<int64_t, int, int, float, float, std::optional<Matrix>, std::optional<Matrix>, bool>(),
           nb::arg("width"), nb::arg("heads"), nb::arg("head_dim"), nb::arg("scale"), nb::arg("eps"),
           nb::arg("cos").noconvert().none(), nb::arg("sin").noconvert().none(), nb::arg("gated"))
      .def("add", &DecoderLayers::add, nb::arg("own_norm"), nb::arg("qkv"), nb::arg("own_out"), nb::arg("cross_norm"),
           nb::arg("query"), nb::arg("cross_out"), nb::arg("feed_norm"), nb::arg("up"), nb::arg("down"))
      .def("run", &DecoderLayers::run, nb::arg("x").noconvert(), nb::arg("pool").noconvert(),
           nb::arg("own_tables").noconvert(), nb::arg("own_lengths").noconvert(), nb::arg("audio_pool").noconvert(),
           nb::arg("audio_tables").noconvert(), nb::arg("audio_lengths").noconvert(), nb::arg("int8_audio"),
           nb::arg("queries"));
}

}  // namespace asr_serve
