#include "int8_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "int8.h"
#include "torch_numbers.h"

#if defined(ASR_SERVE_HAS_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nb = nanobind;

namespace asr_serve {
namespace {

const Int8Kernels* chosen = &generic::int8;
ParallelFor threads = nullptr;

#if defined(ASR_SERVE_HAS_NEON)
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Apple processor
#endif
}
#endif

// What this CPU has of what was compiled, the fastest first.
std::vector<const Int8Kernels*> usable() {
  std::vector<const Int8Kernels*> found;
#if defined(ASR_SERVE_HAS_X86)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("f16c");
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512cd");
  if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&avx512_vnni::int8);
  if (has_avx512) found.push_back(&avx512::int8);
#if defined(ASR_SERVE_HAS_AVX_VNNI)
  if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&avx_vnni::int8);
#endif
  if (has_avx2) found.push_back(&avx2::int8);
#elif defined(ASR_SERVE_HAS_NEON)
  if (has_dot_products()) found.push_back(&neon_dot::int8);
  found.push_back(&neon::int8);
#endif
  found.push_back(&generic::int8);
  return found;
}

void choose(const std::string& wanted) {
  for (const Int8Kernels* kernels : usable())
    if (wanted == "auto" || wanted == kernels->name) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("this CPU has no " + wanted);
}

class Int8Linear {
 public:
  Int8Linear(Array<int8_t, 4> packed, Array<float, 1> scale, std::optional<Array<float, 1>> bias, int64_t in,
             std::optional<Array<float, 1>> norm_weight, std::optional<Array<float, 1>> norm_bias, float eps)
      : packed_(packed), scale_(scale), bias_(bias), norm_weight_(norm_weight), norm_bias_(norm_bias) {
    int64_t out = int64_t(scale.size()), blocks = (out + INT8_OUTPUTS - 1) / INT8_OUTPUTS;
    int64_t groups = (in + INT8_INPUTS - 1) / INT8_INPUTS;
    require(out > 0 && in > 0 && in <= 65536, "a product has 1 to 65536 inputs, and an output");
    require(int64_t(packed.shape(0)) == blocks && int64_t(packed.shape(1)) == groups &&
                packed.shape(2) == INT8_OUTPUTS && packed.shape(3) == INT8_INPUTS,
            "packed must be (outputs / 16, inputs / 4, 16, 4)");
    require(!bias || int64_t(bias->size()) == out, "one bias for each output");
    require(norm_weight || !norm_bias, "a norm's bias comes with its weight");
    for (const auto& norm : {norm_weight, norm_bias}) require(!norm || int64_t(norm->size()) == in, "a norm is (inputs,)");
    weights_ = {packed.data(), scale.data(), bias ? bias->data() : nullptr, in, out,
                {norm_weight ? norm_weight->data() : nullptr, norm_bias ? norm_bias->data() : nullptr, eps}};
  }

  void product(nb::handle x, nb::handle out, nb::handle add, bool gelu, int bits) const {
    Numbers from = numbers(x), to = numbers(out), more;
    require(bits == 8 || bits == 16, "bits must be 8 or 16");
    require(last(x) == weights_.in, "x must be (..., in)");
    int64_t rows = from.count / weights_.in;
    require(last(out) == weights_.out && to.count == rows * weights_.out, "out must be (..., out), a row for each of x");
    require(from.bf16 || !to.bf16, "float32 is not rounded to bfloat16 here");
    if (!add.is_none()) {
      more = numbers(add);
      require(more.bf16 == from.bf16 && last(add) == weights_.out && more.count == to.count,
              "add must have the shape of out and the dtype of x");
    }
    nb::gil_scoped_release release;
    chosen->product({weights_, from.data, to.data, more.data, from.bf16, to.bf16, rows, bits, gelu}, threads);
  }

  int64_t nbytes() const {
    size_t bytes = packed_.nbytes() + scale_.nbytes();
    for (const auto& more : {bias_, norm_weight_, norm_bias_}) bytes += more ? more->nbytes() : 0;
    return int64_t(bytes);
  }
  const Int8Weights& weights() const { return weights_; }

 private:
  Array<int8_t, 4> packed_;
  Array<float, 1> scale_;
  std::optional<Array<float, 1>> bias_, norm_weight_, norm_bias_;
  Int8Weights weights_;
};

}  // namespace

const Int8Kernels& int8_kernels() { return *chosen; }

Int8Weights int8_weights(nb::handle linear) { return nb::cast<const Int8Linear&>(linear).weights(); }

void add_int8(nb::module_& m, ParallelFor parallel) {
  threads = parallel;
  choose("auto");
  m.def("int8_isa", [] { return std::string(chosen->name); }, "The instruction set of 8-bit products.");
  m.def("int8_isas", [] {
    nb::list names;
    for (const Int8Kernels* kernels : usable()) names.append(kernels->name);
    return names;
  }, "Those that this CPU has, the fastest first.");
  m.def("int8_dots", [] { return chosen->dots; }, "Whether it multiplies integers of 8 bits by 8 in one go.");
  m.def("choose_int8_isa", &choose, nb::arg("isa"), "Force an instruction set, or 'auto'. For tests.");
  nb::class_<Int8Linear>(m, "Int8Linear", "See int8_reference.Int8Linear.")
      .def(nb::init<Array<int8_t, 4>, Array<float, 1>, std::optional<Array<float, 1>>, int64_t,
                    std::optional<Array<float, 1>>, std::optional<Array<float, 1>>, float>(),
           nb::arg("packed").noconvert(), nb::arg("scale").noconvert(), nb::arg("bias").noconvert().none(),
           nb::arg("inputs"), nb::arg("norm_weight").noconvert() = nb::none(),
           nb::arg("norm_bias").noconvert() = nb::none(), nb::arg("eps") = 0.0f)
      .def("__call__", &Int8Linear::product, nb::arg("x"), nb::arg("out"), nb::arg("add").none(), nb::arg("gelu"),
           nb::arg("bits"))
      .def_prop_ro("nbytes", &Int8Linear::nbytes);
}

}  // namespace asr_serve
