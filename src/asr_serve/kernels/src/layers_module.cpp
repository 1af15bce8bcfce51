#include "layers_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"

namespace nb = nanobind;

namespace asr_serve {
namespace {

const RunLayers* run_layers = nullptr;
TileMultiply tile_multiply = nullptr;
bool use_tiles = true;
ParallelFor threads = nullptr;

template <size_t N>
using Floats = nb::ndarray<float, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Read = std::tuple<int64_t, int64_t, int64_t>;

bool is_bf16(const Any& x) {
  if (x.dtype() == nb::dtype<float>()) return false;
  require(x.dtype().code == uint8_t(nb::dlpack::dtype_code::Bfloat) && x.dtype().bits == 16,
          "dtype must be float32 or bfloat16");
  return true;
}

class FrameLayers {
 public:
  FrameLayers(int64_t input_width, int64_t ivector_width, int64_t subsampling, int64_t input_history)
      : input_width_(input_width), ivector_width_(ivector_width), subsampling_(subsampling),
        input_history_(input_history) {
    require(input_width > 0 && ivector_width >= 0 && subsampling > 0 && input_history >= 0, "widths are above 0");
  }

  void add(int64_t width, int64_t stride, int64_t ahead, int64_t history, bool relu, bool primed,
           const std::vector<Read>& reads, const std::vector<float>& scales, std::optional<Any> weight,
           std::optional<Floats<1>> bias, bool ivector) {
    require(width > 0 && history >= 0 && (stride == 1 || stride == subsampling_) && !reads.empty(),
            "a layer has a width, a stride of 1 or subsampling, and inputs");
    Layer layer{.width = width, .stride = stride, .ahead = ahead, .history = history, .state = state_width_,
                .relu = relu, .ivector = ivector, .primed = primed, .rounded = false, .tiled = false, .reads = {}, .scales = scales,
                .weight = nullptr, .bias = nullptr, .last_reader = -1};
    const int64_t number = int64_t(layers_.size());
    int64_t inputs = ivector ? ivector_width_ : 0;
    for (const auto& [source, lag, step] : reads) {
      require(source >= 0 && source <= number && lag >= 0 && step >= 1, "a layer reads those before it");
      const int64_t from_stride = source ? layers_[size_t(source - 1)].stride : 1;
      const int64_t from_history = source ? layers_[size_t(source - 1)].history : input_history_;
      const int64_t from_width = source ? layers_[size_t(source - 1)].width : input_width_;
      // The oldest of n * stride / from_stride frames lies inside, whatever n.
      require(step * from_stride == stride && lag - step + 1 <= from_history, "a read reaches before the history");
      require(!primed || !source || layers_[size_t(source - 1)].primed, "a primed layer reads primed ones");
      require(scales.empty() || from_width == width, "a sum is of equal widths");
      inputs += from_width;
      layer.reads.push_back({source, lag, step});
      if (source) layers_[size_t(source - 1)].last_reader = number;
    }
    require(history == 0 || primed, "a layer with history is primed");
    if (scales.empty()) {
      const size_t blocks = size_t((width + LAYER_OUTPUTS - 1) / LAYER_OUTPUTS);
      require(weight.has_value() && bias.has_value(), "a matrix has a weight and a bias");
      layer.rounded = is_bf16(*weight);
      layer.tiled = weight->ndim() == 4;
      if (layer.tiled) {
        const size_t pairs = size_t((width + 31) / 32);
        require(tile_multiply && layer.rounded && !ivector && weight->shape(0) == 2 * pairs &&
                    int64_t(weight->shape(1)) == (inputs + 31) / 32 * 16 && weight->shape(2) == LAYER_OUTPUTS &&
                    weight->shape(3) == 2 && bias->size() == 32 * pairs,
                "weight must be (outputs / 16, inputs / 2, 16, 2), padded to 32 outputs and inputs");
      } else {
        require(weight->ndim() == 3 && weight->shape(0) == blocks && int64_t(weight->shape(1)) == inputs &&
                    weight->shape(2) == LAYER_OUTPUTS && bias->size() == blocks * LAYER_OUTPUTS,
                "weight must be (outputs / 16, inputs, 16), bias padded likewise");
      }
      tiled_ = tiled_ || layer.tiled;
      // Layers that are rounded hold bf16 beside tiles, and others read float32.
      for (const auto& [source, lag, step] : reads)
        exact_reads_ = exact_reads_ && (source == 0) == !layer.tiled;
      layer.weight = weight->data();
      layer.bias = bias->data();
      weights_.push_back(*weight);
      biases_.push_back(*bias);
    } else {
      for (const auto& [source, lag, step] : reads) exact_reads_ = exact_reads_ && source != 0;
      require(scales.size() == reads.size() && !weight && !bias && !ivector, "a sum has a scale for each input");
    }
    state_width_ += history * width;
    layers_.push_back(std::move(layer));
  }

  void run(Floats<3> frames, Floats<2> before, Floats<2> after, Any state, std::optional<Any> out) const {
    require(!tiled_ || exact_reads_, "beside tiles, float32 matrices read the input alone, and other layers none of it");
    require(!layers_.empty() && layers_.back().history == 0, "the last layer has no history");
    const int64_t sessions = int64_t(frames.shape(1)), block = int64_t(frames.shape(0)) - input_history_;
    require(sessions >= 1 && block >= subsampling_ && block % subsampling_ == 0 &&
                int64_t(frames.shape(2)) == input_width_,
            "frames must be (history + n * subsampling, sessions, width)");
    for (const Floats<2>* x : {&before, &after})
      require(int64_t(x->shape(0)) == sessions && int64_t(x->shape(1)) == ivector_width_,
              "i-vectors must be (sessions, width)");
    require(state.ndim() == 2 && int64_t(state.shape(0)) == sessions && int64_t(state.shape(1)) == state_width_,
            "state must be (sessions, state width)");
    require(!out || (out->ndim() == 3 && is_bf16(*out) == is_bf16(state) && int64_t(out->shape(0)) == block / layers_.back().stride &&
                     int64_t(out->shape(1)) == sessions && int64_t(out->shape(2)) == layers_.back().width),
            "out must be (frames, sessions, width of the last layer), in the dtype of state");
    const LayersCall call{&layers_, sessions, block, input_history_, input_width_, ivector_width_, subsampling_,
                          state_width_, frames.data(), before.data(), after.data(), state.data(), is_bf16(state),
                          !out, out ? out->data() : nullptr, tiled_ ? tile_multiply : nullptr};
    require(!tiled_ || call.state_rounded, "beside tiles, state must be bfloat16");
    nb::gil_scoped_release release;
    (*run_layers)(call, threads);
  }

  int64_t state_width() const { return state_width_; }

 private:
  bool tiled_ = false, exact_reads_ = true;
  int64_t input_width_, ivector_width_, subsampling_, input_history_, state_width_ = 0;
  std::vector<Layer> layers_;
  std::vector<Any> weights_;  // kept alive
  std::vector<Floats<1>> biases_;
};

}  // namespace

void add_layers(nb::module_& m, const RunLayers* run, ParallelFor parallel) {
  run_layers = run;
  threads = parallel;
  tile_multiply = find_tiles();
  m.def("has_tiles", [] { return tile_multiply && use_tiles; }, "Whether bf16 weights of layers are to be packed for tiles.");
  m.def("use_tiles", [](bool use) { use_tiles = use; }, nb::arg("use"), "Whether has_tiles may be true. For tests.");
  nb::class_<FrameLayers>(m, "FrameLayers", "A compiled list of layers over frames of many sessions.")
      .def(nb::init<int64_t, int64_t, int64_t, int64_t>(), nb::arg("input_width"), nb::arg("ivector_width"),
           nb::arg("subsampling"), nb::arg("input_history"))
      .def("add", &FrameLayers::add, nb::arg("width"), nb::arg("stride"), nb::arg("ahead"), nb::arg("history"),
           nb::arg("relu"), nb::arg("primed"), nb::arg("reads"), nb::arg("scales"),
           nb::arg("weight").noconvert().none(), nb::arg("bias").noconvert().none(), nb::arg("ivector"))
      .def("run", &FrameLayers::run, nb::arg("frames").noconvert(), nb::arg("before").noconvert(),
           nb::arg("after").noconvert(), nb::arg("state").noconvert(), nb::arg("out").noconvert().none())
      .def_prop_ro("state_width", &FrameLayers::state_width);
}

}  // namespace asr_serve
