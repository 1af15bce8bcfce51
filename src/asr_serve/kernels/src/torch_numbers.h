// Tensors of torch as the Python faces of products take them.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "arguments.h"

namespace nb = nanobind;

namespace asr_serve {
namespace {

// A tensor's numbers, asked of torch itself: DLPack takes microseconds for each, which is what a product of one row
// takes.
struct Numbers {
  void* data = nullptr;
  bool bf16 = false;
  int64_t count = 0;
};

struct Torch {
  PyObject *float32, *bfloat16;
  nb::object dtype = nb::str("dtype"), data_ptr = nb::str("data_ptr"), numel = nb::str("numel"),
             is_contiguous = nb::str("is_contiguous"), is_cpu = nb::str("is_cpu"), shape = nb::str("shape");
};

inline const Torch& torch() {
  static const Torch* names = [] {  // never let go: Python may end before us
    nb::module_ module = nb::module_::import_("torch");
    return new Torch{nb::object(module.attr("float32")).release().ptr(), nb::object(module.attr("bfloat16")).release().ptr()};
  }();
  return *names;
}

inline Numbers numbers(nb::handle x) {
  const Torch& names = torch();
  PyObject* dtype = nb::object(x.attr(names.dtype)).ptr();
  require(dtype == names.float32 || dtype == names.bfloat16, "dtype must be float32 or bfloat16");
  require(nb::cast<bool>(x.attr(names.is_cpu)), "tensors must be the CPU's");
  require(nb::cast<bool>(x.attr(names.is_contiguous)()), "tensors must be contiguous");
  return {reinterpret_cast<void*>(nb::cast<uintptr_t>(x.attr(names.data_ptr)())), dtype == names.bfloat16,
          nb::cast<int64_t>(x.attr(names.numel)())};
}

inline std::vector<int64_t> shape_of(nb::handle x) {
  std::vector<int64_t> shape;
  for (nb::handle size : nb::object(x.attr(torch().shape))) shape.push_back(nb::cast<int64_t>(size));
  return shape;
}

inline int64_t last(nb::handle x) {
  nb::object shape = x.attr(torch().shape);
  size_t n = nb::len(shape);
  require(n > 0, "a tensor of no dimension");
  return nb::cast<int64_t>(shape[n - 1]);
}

}  // namespace
}  // namespace asr_serve
