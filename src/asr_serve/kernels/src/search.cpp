// The Python face of the CTC search: checks shapes, lets go of the GIL, and shares rows out to threads.
#include "search.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <vector>

#include "team.h"

namespace nb = nanobind;
using namespace asr_serve;

namespace {

template <typename S>
using Array = nb::ndarray<S, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

struct Found {
  int64_t fixed, tail;
};

// The rows of one call.
struct Work {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> corrupt{-1};
  int64_t items, width, slots, stride;
  const float* logprobs;
  const int64_t *rows, *seen, *frames;
  Row first;
  Options options;
  const Graph* graph;
  const Language* language;
  Item* said;  // `stride` for each item: what is fixed from its beginning on, the tail up to its end
  Found* found;
};

void hear(Work& work, int64_t i, Beam& beam) {
  const Options& o = work.options;
  int64_t r = work.rows[i];
  work.found[i] = {0, 0};
  if (r == work.slots - 1) return;
  Row row{work.first.counts + 3 * r, work.first.heads + o.size * r, work.first.nodes + 3 * o.arena * r,
          work.first.scores + 2 * o.size * r, work.first.peaks + 2 * o.arena * r};
  if (work.first.gains) row.gains = work.first.gains + o.size * r;
  if (work.graph) row.spots = work.first.spots + o.size * r;
  if (work.language) row.contexts = work.first.contexts + o.size * r;
  Item* said = work.said + work.stride * i;
  if (!beam.load(row, o, said, work.graph, work.language)) {
    work.corrupt = r;
    return;
  }
  for (int64_t f = 0; f < work.frames[i]; ++f)
    beam.hear(work.logprobs + (i * work.width + f) * o.vocab, work.seen[i] + f);
  beam.save(row);
  work.found[i] = {beam.fixed_count(), beam.path(said + work.stride)};
}

void drain(void* pointer) {
  thread_local Beam beam;
  // Through a pointer that the compiler knows nothing of, or it asks for the thread's address at every use.
  Beam* volatile mine = &beam;
  auto& work = *static_cast<Work*>(pointer);
  for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.items;) hear(work, i, *mine);
}

nb::list listed(const Item* items, int64_t count) {
  nb::list out;
  for (int64_t i = 0; i < count; ++i) out.append(nb::make_tuple(items[i].token, items[i].frame, items[i].logprob));
  return out;
}

// The arrays of hot words, as `step` is given them: what they point at is the caller's.
struct Hot {
  Array<int64_t> spots;
  Array<double> gains;
  Array<const int64_t> firsts, tokens, nexts, fails;
  Array<const double> partial_bonuses, word_bonuses;
  Array<const uint8_t> opens;
  Graph graph;

  Hot(const nb::tuple& given, int64_t slots, int64_t size, int64_t vocab) {
    require(given.size() == 10,
            "bias: spots, gains, firsts, tokens, nexts, fails, partial_bonuses, word_bonuses, opens, boost");
    spots = nb::cast<Array<int64_t>>(given[0], false), gains = nb::cast<Array<double>>(given[1], false);
    firsts = nb::cast<Array<const int64_t>>(given[2], false), tokens = nb::cast<Array<const int64_t>>(given[3], false);
    nexts = nb::cast<Array<const int64_t>>(given[4], false), fails = nb::cast<Array<const int64_t>>(given[5], false);
    partial_bonuses = nb::cast<Array<const double>>(given[6], false);
    word_bonuses = nb::cast<Array<const double>>(given[7], false);
    opens = nb::cast<Array<const uint8_t>>(given[8], false);
    auto count = int64_t(fails.size());
    require(int64_t(spots.size()) == slots * size && int64_t(gains.size()) == slots * size && count >= 2 &&
                int64_t(firsts.size()) == count + 1 && nexts.size() == tokens.size() &&
                int64_t(partial_bonuses.size()) == count && int64_t(word_bonuses.size()) == count &&
                int64_t(opens.size()) == vocab &&
                firsts.data()[0] == 0 && firsts.data()[count] == int64_t(tokens.size()),
            "bias: arrays that do not fit each other");
    graph = {count, firsts.data(), tokens.data(), nexts.data(), fails.data(),
             partial_bonuses.data(), word_bonuses.data(), opens.data(), nb::cast<double>(given[9])};
  }
};

// The arrays of a language model, as `step` is given them: what they point at is the caller's.
struct Fused {
  Array<int64_t> contexts;
  Array<double> gains;
  Array<const int64_t> offsets;
  Array<const int32_t> words, nexts, backoffs;
  Array<const float> logprobs, backoff_logprobs, final_logprobs;
  Language language;

  Fused(const nb::tuple& given, int64_t slots, int64_t size) {
    require(given.size() == 12, "language: contexts, gains, the eight fields of an NgramModel, weight, token_bonus");
    contexts = nb::cast<Array<int64_t>>(given[0], false), gains = nb::cast<Array<double>>(given[1], false);
    offsets = nb::cast<Array<const int64_t>>(given[2], false), words = nb::cast<Array<const int32_t>>(given[3], false);
    logprobs = nb::cast<Array<const float>>(given[4], false), nexts = nb::cast<Array<const int32_t>>(given[5], false);
    backoffs = nb::cast<Array<const int32_t>>(given[6], false);
    backoff_logprobs = nb::cast<Array<const float>>(given[7], false);
    final_logprobs = nb::cast<Array<const float>>(given[8], false);
    auto start = nb::cast<int32_t>(given[9]);
    auto count = int64_t(backoffs.size());
    require(int64_t(contexts.size()) == slots * size && int64_t(gains.size()) == slots * size && count >= 1 &&
                int64_t(offsets.size()) == count + 1 && logprobs.size() == words.size() &&
                nexts.size() == words.size() && int64_t(backoff_logprobs.size()) == count &&
                int64_t(final_logprobs.size()) == count && offsets.data()[0] == 0 &&
                offsets.data()[count] == int64_t(words.size()) && start >= 0 && start < count,
            "language: arrays that do not fit each other");
    language = {{offsets.data(), words.data(), logprobs.data(), nexts.data(), backoffs.data(), backoff_logprobs.data(),
                 final_logprobs.data(), int32_t(count), start},
                nb::cast<double>(given[10]), nb::cast<double>(given[11])};
  }
};

nb::list step(Array<const float> logprobs, Array<const int64_t> rows, Array<const int64_t> seen,
              Array<const int64_t> frames, Array<int64_t> counts, Array<int64_t> heads, Array<double> scores,
              Array<int64_t> nodes, Array<double> peaks, int64_t blank, int64_t top, double min_logprob,
              double max_gap, int64_t threads, const std::optional<nb::tuple>& bias,
              const std::optional<nb::tuple>& language) {
  require(logprobs.ndim() == 3, "logprobs must be (n, frames, vocab)");
  auto n = int64_t(logprobs.shape(0)), width = int64_t(logprobs.shape(1)), vocab = int64_t(logprobs.shape(2));
  require(counts.ndim() == 2 && heads.ndim() == 2 && scores.ndim() == 3 && nodes.ndim() == 3 && peaks.ndim() == 3,
          "counts, heads, scores, nodes, peaks: matrices, and three cubes");
  auto slots = int64_t(counts.shape(0)), size = int64_t(heads.shape(1)), arena = int64_t(nodes.shape(1));
  require(counts.shape(1) == 3 && int64_t(heads.shape(0)) == slots && int64_t(scores.shape(0)) == slots &&
              int64_t(scores.shape(1)) == size && scores.shape(2) == 2 && int64_t(nodes.shape(0)) == slots &&
              nodes.shape(2) == 3 && int64_t(peaks.shape(0)) == slots && int64_t(peaks.shape(1)) == arena &&
              peaks.shape(2) == 2 && size >= 1 && arena >= 1 && slots >= 1,
          "the state's tensors must be (slots, 3), (slots, beam), (slots, beam, 2), (slots, arena, 3), "
          "(slots, arena, 2)");
  require(blank >= 0 && blank < vocab, "blank is out of range");
  require(top >= 1, "top must be at least 1");
  require(int64_t(rows.size()) == n && int64_t(seen.size()) == n && int64_t(frames.size()) == n,
          "rows, seen and frames: one for each row of logprobs, and no row twice");
  // Of the calling thread: written by those that help it, read when all are done.
  thread_local std::vector<int64_t> taken;
  thread_local std::vector<Item> said;
  thread_local std::vector<Found> found;
  taken.clear();
  for (int64_t i = 0; i < n; ++i) {
    int64_t r = rows.data()[i], f = frames.data()[i];
    require(r >= 0 && r < slots && f >= 0 && f <= width, "a row or its frames are out of range");
    if (r != slots - 1) taken.push_back(r);
  }
  std::sort(taken.begin(), taken.end());
  require(std::adjacent_find(taken.begin(), taken.end()) == taken.end(),
          "rows, seen and frames: one for each row of logprobs, and no row twice");
  int64_t stride = arena + (arena + width);  // no path is longer than the arena and what a chunk adds to it
  said.resize(size_t(n * stride)), found.resize(size_t(n));
  std::optional<Hot> hot;
  if (bias) hot.emplace(*bias, slots, size, vocab);
  std::optional<Fused> fused;
  if (language) fused.emplace(*language, slots, size);
  double* gains = hot ? hot->gains.data() : fused ? fused->gains.data() : nullptr;
  require(!hot || !fused || fused->gains.data() == gains, "bias and language have one tensor of gains");
  Work work{.items = n, .width = width, .slots = slots, .stride = stride, .logprobs = logprobs.data(),
            .rows = rows.data(), .seen = seen.data(), .frames = frames.data(),
            .first = {counts.data(), heads.data(), nodes.data(), scores.data(), peaks.data(),
                      hot ? hot->spots.data() : nullptr, gains, fused ? fused->contexts.data() : nullptr},
            .options = {vocab, size, arena, blank, std::min(top, vocab), min_logprob, max_gap},
            .graph = hot ? &hot->graph : nullptr, .language = fused ? &fused->language : nullptr,
            .said = said.data(), .found = found.data()};
  {
    nb::gil_scoped_release release;
    const auto team = unsigned(std::clamp<int64_t>(threads, 1, std::max<int64_t>(n, 1)));
    Team::mine().run(drain, &work, team);
  }
  require(work.corrupt < 0, "a row of the state is corrupt");
  nb::list out;
  for (int64_t i = 0; i < n; ++i) {
    const Item* items = said.data() + i * stride;
    const Found& f = found[size_t(i)];
    out.append(nb::make_tuple(listed(items, f.fixed), listed(items + stride - f.tail, f.tail)));
  }
  return out;
}

}  // namespace

NB_MODULE(_search, m) {
  m.doc() = "CTC prefix beam search; asr_serve.kernels.ctc_search_reference is the same in Python.";
  m.def("address", [](Array<const float> logprobs) { return reinterpret_cast<uintptr_t>(logprobs.data()); },
        nb::arg("logprobs").noconvert(), "Where `step` reads a tensor: it is never copied.");
  m.def("step", &step, nb::arg("logprobs").noconvert(), nb::arg("rows").noconvert(), nb::arg("seen").noconvert(),
        nb::arg("frames").noconvert(), nb::arg("counts").noconvert(), nb::arg("heads").noconvert(),
        nb::arg("scores").noconvert(), nb::arg("nodes").noconvert(), nb::arg("peaks").noconvert(), nb::arg("blank"),
        nb::arg("top"), nb::arg("min_logprob"), nb::arg("max_gap"), nb::arg("threads"),
        nb::arg("bias") = nb::none(), nb::arg("language") = nb::none(),
        "One chunk of many sessions: what was fixed by it, and the rest of the best entry, of each.");
}
