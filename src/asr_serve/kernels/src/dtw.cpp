// Dynamic time warping through a table of costs. ../dtw_reference.py does the same in numpy, operation by operation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

using Cost = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Frames = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

constexpr double NONE = std::numeric_limits<double>::infinity();
enum : uint8_t { BOTH, ROW, FRAME };

// Where each row begins on the cheapest way through `cost`.
void walk(const float* cost, int64_t rows, int64_t frames, int64_t* found) {
  std::vector<double> above(size_t(frames + 1), NONE), here(size_t(frames + 1), NONE);
  std::vector<uint8_t> back(size_t(rows * frames));
  above[0] = 0.0;
  for (int64_t row = 0; row < rows; ++row) {
    here[0] = NONE;
    for (int64_t frame = 0; frame < frames; ++frame) {
      double both = above[size_t(frame)], up = above[size_t(frame + 1)], along = here[size_t(frame)];
      uint8_t how = both <= up && both <= along ? BOTH : up <= along ? ROW : FRAME;
      back[size_t(row * frames + frame)] = how;
      here[size_t(frame + 1)] = std::min({both, up, along}) + double(cost[row * frames + frame]);
    }
    std::swap(above, here);
  }
  for (int64_t row = rows - 1, frame = frames - 1; row >= 0;) {
    found[row] = frame;
    uint8_t how = back[size_t(row * frames + frame)];
    row -= how != FRAME;
    frame -= how != ROW;
  }
}

Frames first_frames(Cost cost) {
  auto rows = int64_t(cost.shape(0)), frames = int64_t(cost.shape(1));
  if (!rows || !frames) throw std::invalid_argument("cost: (rows, frames), one of each at least");
  auto* found = new int64_t[size_t(rows)]();
  nb::capsule owner(found, [](void* held) noexcept { delete[] static_cast<int64_t*>(held); });
  {
    nb::gil_scoped_release release;
    walk(cost.data(), rows, frames, found);
  }
  return Frames(found, {size_t(rows)}, owner);
}

}  // namespace

NB_MODULE(_dtw, m) {
  m.doc() = "Dynamic time warping; asr_serve.kernels.dtw_reference is the same in numpy.";
  m.def("first_frames", &first_frames, nb::arg("cost").noconvert(),
        "Where each row begins on the cheapest way from the first corner to the last.");
}
