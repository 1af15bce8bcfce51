// CTC forced alignment: Viterbi through blanks and known tokens. ../ctc_alignment_reference.py does the same in numpy, operation
// by operation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace {

template <typename S>
using Array = nb::ndarray<S, nb::c_contig, nb::device::cpu>;

constexpr double NONE = -std::numeric_limits<double>::infinity();
enum : uint8_t { STAY, ONE, TWO };

double clean(float x) { return std::isfinite(x) ? double(x) : NONE; }

// What a path costs so far in each state, 2 * tokens + 1 of them, and how each was reached at each frame.
struct Paths {
  const float *blank, *labels;
  const bool* repeats;
  int64_t frames, tokens;
  std::vector<int64_t> first, behind;

  double run() {
    int64_t states = 2 * tokens + 1;
    std::vector<double> best(size_t(states), NONE);
    std::vector<uint8_t> back(size_t(frames * states), STAY);
    if (frames) {
      best[0] = clean(blank[0]);
      if (tokens) best[1] = clean(labels[0]);
    }
    for (int64_t f = 1; f < frames; ++f) {
      // States that cannot be reached yet, and those from which the end cannot be reached any more, are left out.
      int64_t high = std::min(states - 1, 2 * f + 1), low = std::max<int64_t>(0, states - 2 * (frames - f));
      uint8_t* how = back.data() + f * states;
      double quiet = clean(blank[f]);
      for (int64_t s = high; s >= low; --s) {
        double from = best[size_t(s)];
        if (s >= 1 && best[size_t(s - 1)] > from) from = best[size_t(s - 1)], how[s] = ONE;
        bool skips = s % 2 && s >= 3 && !repeats[s / 2];
        if (skips && best[size_t(s - 2)] > from) from = best[size_t(s - 2)], how[s] = TWO;
        best[size_t(s)] = from + (s % 2 ? clean(labels[f * tokens + s / 2]) : quiet);
      }
    }
    int64_t state = states - 1;
    if (tokens && frames && best[size_t(state - 1)] > best[size_t(state)]) --state;
    double score = frames ? best[size_t(state)] : tokens ? NONE : 0.0;
    if (score == NONE) return score;
    first.assign(size_t(tokens), 0), behind.assign(size_t(tokens), 0);
    for (int64_t f = frames - 1; f >= 0; --f) {
      if (state % 2) {
        auto token = size_t(state / 2);
        if (!behind[token]) behind[token] = f + 1;
        first[token] = f;
      }
      state -= back[size_t(f * states + state)];
    }
    return score;
  }
};

nb::tuple align(Array<const float> blank, Array<const float> labels, Array<const bool> repeats) {
  if (blank.ndim() != 1 || labels.ndim() != 2 || repeats.ndim() != 1 || labels.shape(0) != blank.shape(0) ||
      labels.shape(1) != repeats.shape(0))
    throw std::invalid_argument("blank (frames,), labels (frames, tokens) and repeats (tokens,)");
  Paths paths{.blank = blank.data(), .labels = labels.data(), .repeats = repeats.data(),
              .frames = int64_t(labels.shape(0)), .tokens = int64_t(labels.shape(1)), .first = {}, .behind = {}};
  double score;
  {
    nb::gil_scoped_release release;
    score = paths.run();
  }
  if (score == NONE)
    throw std::invalid_argument(std::to_string(paths.tokens) + " tokens cannot be said in " +
                                std::to_string(paths.frames) + " frames");
  nb::list spans;
  for (size_t i = 0; i < paths.first.size(); ++i) spans.append(nb::make_tuple(paths.first[i], paths.behind[i]));
  return nb::make_tuple(spans, score);
}

}  // namespace

NB_MODULE(_align, m) {
  m.doc() = "CTC forced alignment; asr_serve.kernels.ctc_alignment_reference is the same in numpy.";
  m.def("align", &align, nb::arg("blank").noconvert(), nb::arg("labels").noconvert(), nb::arg("repeats").noconvert(),
        "The likeliest path through blanks and tokens.");
}
