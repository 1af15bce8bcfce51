// Checks of arguments, shared by the Python faces of the kernels.
#pragma once
#include <nanobind/ndarray.h>

#include <stdexcept>

namespace asr_serve {
namespace {

// A contiguous array on the CPU: of N dimensions, or of any number of them without N.
template <typename S, size_t... N>
using Array = nanobind::ndarray<S, nanobind::ndim<N>..., nanobind::c_contig, nanobind::device::cpu>;

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

}  // namespace
}  // namespace asr_serve
