#include "attention_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "attention.h"
#include "tiles.h"
#include "torch_numbers.h"

namespace asr_serve {
namespace {

ParallelFor threads = nullptr;
AttendClips<float> (*chosen)() = nullptr;

using Angles = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void attend_clips(nb::handle qkv, const std::vector<int64_t>& frames, std::optional<Angles> cos,
                  std::optional<Angles> sin, float scale, nb::handle out) {
  const std::vector<int64_t> shape = shape_of(qkv);
  require(shape.size() == 4 && shape[1] == 3 && shape[2] >= 1 && shape[3] >= 1 && shape[3] <= LONGEST_HEAD,
          "qkv must be (frames, 3, heads, head_dim), with a head_dim of at most 512");
  const Numbers from = numbers(qkv), to = numbers(out);
  require(from.bf16 == to.bf16, "qkv and out must have one dtype");
  require(!from.bf16 || find_clip_attention(), "this CPU has no products of bf16");
  require(shape_of(out) == std::vector<int64_t>{shape[0], shape[2] * shape[3]}, "out must be (frames, heads * head_dim)");
  int64_t total = 0, longest = 0;
  for (int64_t count : frames) {
    require(count >= 0 && count <= shape[0] - total, "clips have 0 frames or more, and not more than qkv together");
    total += count;
    longest = std::max(longest, count);
  }
  require(bool(cos) == bool(sin), "cos and sin come together");
  if (cos)
    require(cos->shape(0) == sin->shape(0) && cos->shape(1) == sin->shape(1) && 2 * int64_t(cos->shape(1)) <= shape[3] &&
                int64_t(cos->shape(0)) >= longest,
            "cos, sin must be (positions, half), with a position for each frame of a clip");
  nb::gil_scoped_release release;
  auto attend = [&]<typename T>(AttendClips<T> run, T*) {
    const ClipAttention<T> call{.qkv = static_cast<const T*>(from.data), .out = static_cast<T*>(to.data),
                                .frames = frames.data(), .clips = int64_t(frames.size()), .heads = shape[2],
                                .head_dim = shape[3], .cos = cos ? cos->data() : nullptr,
                                .sin = sin ? sin->data() : nullptr, .half = cos ? int64_t(cos->shape(1)) : 0,
                                .scale = scale};
    run(call, threads);
    const int64_t width = shape[2] * shape[3];
    std::memset(call.out + total * width, 0, size_t((shape[0] - total) * width) * sizeof(T));
  };
  if (from.bf16)
    attend(find_clip_attention(), static_cast<uint16_t*>(nullptr));
  else
    attend(chosen(), static_cast<float*>(nullptr));
}

}  // namespace

void add_attention(nb::module_& m, ParallelFor parallel, AttendClips<float> (*chosen_f32)()) {
  threads = parallel;
  chosen = chosen_f32;
  m.def("has_attend_clips", [] { return find_clip_attention() != nullptr; },
        "Whether this CPU has what attend_clips needs for bf16; for float32 every CPU has it.");
  // Where products take matrix tiles, oneDNN's do.
  m.def("prefers_attend_clips", [] { return find_clip_attention() && !find_tiles_of_rows(LONGEST_HEAD); },
        "Whether attend_clips is the fastest way for bf16 on this CPU.");
  m.def("attend_clips", &attend_clips, nb::arg("qkv"), nb::arg("frames"), nb::arg("cos").noconvert().none(),
        nb::arg("sin").noconvert().none(), nb::arg("scale"), nb::arg("out"), "See attention_reference.attend_clips.");
}

}  // namespace asr_serve
