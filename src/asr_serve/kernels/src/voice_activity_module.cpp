#include "voice_activity_module.h"

#include <nanobind/stl/vector.h>

#include "arguments.h"

namespace nb = nanobind;

namespace asr_serve {
namespace {

const VadEncode* vad_encode = nullptr;
ParallelFor threads = nullptr;

class VoiceActivityEncoder {
 public:
  VoiceActivityEncoder(const std::vector<Array<float, 3>>& convs, const std::vector<Array<float, 1>>& biases,
                       Array<float, 2> gates, Array<float, 1> gates_bias) {
    require(int64_t(convs.size()) == VAD_CONVS && biases.size() == convs.size(), "there are four convolutions");
    for (int64_t conv = 0; conv < VAD_CONVS; ++conv) {
      const Array<float, 3>& weight = convs[size_t(conv)];
      const Array<float, 1>& bias = biases[size_t(conv)];
      const int64_t inputs = VAD_CHANNELS[conv], outputs = VAD_CHANNELS[conv + 1];
      require(int64_t(weight.shape(0)) == outputs && int64_t(weight.shape(1)) == inputs && weight.shape(2) == 3 &&
                  int64_t(bias.size()) == outputs,
              "a convolution is (outputs, inputs, 3), of 129, 128, 64, 64 and 128 channels");
      VadConv& made = weights_.convs[size_t(conv)];
      made.bias.assign(bias.data(), bias.data() + outputs);
      made.weight.resize(size_t(3 * inputs * outputs));
      for (int64_t out = 0; out < outputs; ++out)
        for (int64_t in = 0; in < inputs; ++in)
          for (int64_t tap = 0; tap < 3; ++tap)
            made.weight[size_t((tap * inputs + in) * outputs + out)] = weight.data()[(out * inputs + in) * 3 + tap];
    }
    const int64_t width = VAD_CHANNELS[VAD_CONVS];
    require(int64_t(gates.shape(0)) == VAD_OUTPUTS && int64_t(gates.shape(1)) == width &&
                int64_t(gates_bias.size()) == VAD_OUTPUTS,
            "gates are (512, 128), and their bias (512,)");
    weights_.gate_bias.assign(gates_bias.data(), gates_bias.data() + VAD_OUTPUTS);
    weights_.gate_weight.resize(size_t(width * VAD_OUTPUTS));
    for (int64_t gate = 0; gate < VAD_OUTPUTS; ++gate)
      for (int64_t in = 0; in < width; ++in)
        weights_.gate_weight[size_t(in * VAD_OUTPUTS + gate)] = gates.data()[gate * width + in];
  }

  void run(Array<float, 2> pcm, Array<float, 2> context, Array<int64_t, 1> counts, Array<int64_t, 1> offsets,
           Array<float, 2> gates) const {
    const size_t rows = pcm.shape(0);
    require(context.shape(0) == rows && int64_t(context.shape(1)) == VAD_CONTEXT && counts.size() == rows &&
                offsets.size() == rows && int64_t(gates.shape(1)) == VAD_OUTPUTS,
            "context must be (rows, 64), counts and offsets (rows,), gates (steps, 512)");
    const int64_t most = int64_t(pcm.shape(1)) / VAD_WINDOW, steps = int64_t(gates.shape(0));
    for (size_t i = 0; i < rows; ++i)
      require(counts.data()[i] >= 0 && counts.data()[i] <= most && offsets.data()[i] >= 0 &&
                  offsets.data()[i] <= steps && counts.data()[i] <= steps - offsets.data()[i],
              "a row reaches outside its samples or the steps");
    const VadCall call{pcm.data(), context.data(), counts.data(), offsets.data(), gates.data(), int64_t(rows),
                       int64_t(pcm.shape(1))};
    nb::gil_scoped_release release;
    (*vad_encode)(weights_, call, threads);
  }

 private:
  VadWeights weights_;
};

}  // namespace

void add_voice_activity(nb::module_& m, const VadEncode* encode, ParallelFor parallel) {
  vad_encode = encode;
  threads = parallel;
  nb::class_<VoiceActivityEncoder>(m, "VoiceActivityEncoder", "Silero's layers before its LSTM.")
      .def(nb::init<const std::vector<Array<float, 3>>&, const std::vector<Array<float, 1>>&, Array<float, 2>,
                    Array<float, 1>>(),
           nb::arg("convs"), nb::arg("biases"), nb::arg("gates"), nb::arg("gates_bias"))
      .def("run", &VoiceActivityEncoder::run, nb::arg("pcm").noconvert(), nb::arg("context").noconvert(),
           nb::arg("counts").noconvert(), nb::arg("offsets").noconvert(), nb::arg("gates").noconvert());
}

}  // namespace asr_serve
