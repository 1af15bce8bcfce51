#include "bf16_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bf16.h"
#include "torch_numbers.h"

namespace asr_serve {
namespace {

ParallelFor threads = nullptr;

class Bf16Linear {
 public:
  // `packed`: the bits of bf16 numbers.
  Bf16Linear(Array<int16_t, 4> packed, std::optional<Array<float, 1>> bias, int64_t outputs,
             const std::string& activation)
      : packed_(packed), bias_(bias) {
    multiply_ = find_bf16(int64_t(packed.shape(1)) * BF16_INPUTS);
    require(multiply_, "this CPU has no products of bf16");
    require(activation.empty() || activation == "silu" || activation == "gelu_tanh",
            "activation must be empty, silu or gelu_tanh");
    const int64_t blocks = int64_t(packed.shape(0)), gates = activation.empty() ? 1 : 2;
    require(packed.shape(2) == BF16_OUTPUTS && packed.shape(3) == BF16_INPUTS && packed.shape(1) > 0,
            "packed must be (outputs / 16, inputs / 2, 16, 2)");
    require(outputs > 0 && blocks == (outputs + BF16_OUTPUTS - 1) / BF16_OUTPUTS * gates,
            "packed must have the blocks of its outputs, a gate's and its counterpart's in turn");
    require(!bias || int64_t(bias->size()) == blocks * BF16_OUTPUTS, "bias must be padded to whole blocks");
    call_.packed = reinterpret_cast<const uint16_t*>(packed.data());
    call_.bias = bias ? bias->data() : nullptr;
    call_.inputs = int64_t(packed.shape(1)) * BF16_INPUTS;
    call_.blocks = blocks;
    call_.outputs = outputs;
    call_.activation = activation.empty()      ? Activation::none
                       : activation == "silu" ? Activation::silu
                                              : Activation::gelu_tanh;
  }

  void product(nb::handle x, nb::handle out, nb::handle add) const {
    Numbers from = numbers(x), to = numbers(out), more;
    require(from.bf16 && last(x) == call_.inputs, "x must be (..., inputs), bfloat16");
    Bf16Product call = call_;
    call.rows = from.count / call.inputs;
    require(last(out) == call.outputs && to.count == call.rows * call.outputs,
            "out must be (..., outputs), a row for each of x");
    if (!add.is_none()) {
      more = numbers(add);
      require(more.bf16 && last(add) == call.outputs && more.count == to.count,
              "add must have the shape of out, bfloat16");
    }
    call.x = static_cast<const uint16_t*>(from.data);
    call.out = to.data;
    call.out_float = !to.bf16;
    call.add = static_cast<const uint16_t*>(more.data);
    nb::gil_scoped_release release;
    multiply_(call, threads);
  }

  int64_t nbytes() const { return int64_t(packed_.nbytes() + (bias_ ? bias_->nbytes() : 0)); }
  const Bf16Product& call() const { return call_; }
  MultiplyBf16 multiply() const { return multiply_; }

 private:
  Array<int16_t, 4> packed_;
  std::optional<Array<float, 1>> bias_;
  Bf16Product call_{};
  MultiplyBf16 multiply_ = nullptr;
};

}  // namespace

Bf16Product bf16_product(nb::handle linear, MultiplyBf16& multiply) {
  const auto& found = nb::cast<const Bf16Linear&>(linear);
  multiply = found.multiply();
  return found.call();
}

void add_bf16(nb::module_& m, ParallelFor parallel) {
  threads = parallel;
  m.def("bf16_products", [] { return find_bf16(BF16_INPUTS) != nullptr; }, "Whether this CPU has what Bf16Linear needs.");
  nb::class_<Bf16Linear>(m, "Bf16Linear", "See bf16_reference.Bf16Linear.")
      .def(nb::init<Array<int16_t, 4>, std::optional<Array<float, 1>>, int64_t, const std::string&>(),
           nb::arg("packed").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("outputs"),
           nb::arg("activation") = "")
      .def("__call__", &Bf16Linear::product, nb::arg("x"), nb::arg("out"), nb::arg("add").none())
      .def_prop_ro("nbytes", &Bf16Linear::nbytes);
}

}  // namespace asr_serve
