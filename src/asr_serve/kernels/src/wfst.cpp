// The Python face of the search of decoding graphs: checks arrays, lets go of the GIL, and shares rows out to threads.
#include "wfst.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "team.h"

namespace nb = nanobind;
using namespace asr_serve;
using namespace asr_serve::wfst;

namespace {

template <typename S>
using Array = nb::ndarray<const S, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

template <typename S>
std::vector<S> copied(const Array<S>& array) {
  return std::vector<S>(array.data(), array.data() + array.size());
}

constexpr int32_t kMostWords = 1 << 26;

// A graph, and the arrays of its language model, which are not copied.
struct PyGraph {
  Graph graph;
  std::vector<nb::object> owned;
};

void make_graph(PyGraph* self, Array<int32_t> arc_offsets, Array<int32_t> epsilon_offsets, Array<int32_t> arc_labels,
                Array<int32_t> arc_words, Array<float> arc_costs, Array<float> arc_bounds, Array<int32_t> arc_states,
                Array<float> final_costs,
                Array<int32_t> label_columns, Array<int32_t> label_phones, Array<int8_t> phone_boundaries,
                Array<int32_t> depths, int32_t start, const std::optional<nb::tuple>& language_model) {
  size_t states = final_costs.size(), arcs = arc_costs.size(), labels = label_columns.size();
  require(arc_offsets.size() == states + 1 && epsilon_offsets.size() == states && depths.size() == states &&
              arc_labels.size() == arcs && arc_words.size() == arcs && arc_bounds.size() == arcs && arc_states.size() == arcs &&
              label_phones.size() == labels && states < PackedArc::kEpsilon && start >= 0 && size_t(start) < states,
          "arrays of a graph that do not fit each other");
  new (self) PyGraph;
  Graph& g = self->graph;
  g.labels = copied(arc_labels), g.phones = copied(label_phones), g.boundaries = copied(phone_boundaries);
  g.final_costs = copied(final_costs);
  g.start = start, g.width = 0, g.has_lm = language_model.has_value();
  g.arcs.reserve(arcs), g.packed.reserve(arcs), g.states.reserve(states);
  for (size_t i = 0; i < arcs; ++i) {
    int32_t label = arc_labels.data()[i], next = arc_states.data()[i];
    require(label >= -1 && label < int32_t(labels) && next >= 0 && size_t(next) < states, "an arc is out of range");
    int32_t column = label < 0 ? -1 : label_columns.data()[label];
    require(label < 0 || column >= 0, "a label without a column");
    g.width = std::max(g.width, column + 1);
    g.arcs.push_back({column, arc_words.data()[i], arc_costs.data()[i], next});
  }
  for (size_t i = 0; i < states; ++i) {
    int32_t first = arc_offsets.data()[i], epsilon = epsilon_offsets.data()[i], end = arc_offsets.data()[i + 1];
    require(0 <= first && first <= epsilon && epsilon <= end && size_t(end) <= arcs, "offsets of arcs out of range");
    for (int32_t a = first; a < end; ++a)
      require((g.arcs[size_t(a)].column < 0) == (a >= epsilon) &&
                  (a == first || a == epsilon || arc_bounds.data()[a - 1] <= arc_bounds.data()[a]),
              "arcs of a state that are not in order: epsilon arcs behind the others, and bounds that rise");
    g.states.push_back({first, epsilon, end, depths.data()[i]});
  }
  for (size_t i = 0; i < arcs; ++i) {
    const Arc& arc = g.arcs[i];
    const State& to = g.states[size_t(arc.next)];
    uint32_t target = uint32_t(arc.next);
    if ((arc.word >= 0 && g.has_lm) || arc.cost != arc_bounds.data()[i]) target |= PackedArc::kOwnCost;
    if (to.epsilon < to.end) target |= PackedArc::kEpsilon;
    g.packed.push_back({arc_bounds.data()[i], arc.column, target});
  }
  for (size_t i = 0; i < states; ++i)
    for (int32_t a = g.states[i].epsilon; a < g.states[i].end; ++a)
      require(g.states[i].depth >= 0 && g.states[size_t(g.arcs[size_t(a)].next)].depth > g.states[i].depth,
              "an epsilon arc leads to no deeper state");
  if (!g.has_lm) return;
  const nb::tuple& m = *language_model;
  require(m.size() == 8, "language_model: the fields of an NgramModel");
  auto offsets = nb::cast<Array<int64_t>>(m[0], false);
  auto words = nb::cast<Array<int32_t>>(m[1], false);
  auto logprobs = nb::cast<Array<float>>(m[2], false);
  auto next = nb::cast<Array<int32_t>>(m[3], false);
  auto backoffs = nb::cast<Array<int32_t>>(m[4], false);
  auto backoff_logprobs = nb::cast<Array<float>>(m[5], false);
  auto final_logprobs = nb::cast<Array<float>>(m[6], false);
  size_t contexts = backoffs.size();
  require(offsets.size() == contexts + 1 && words.size() == logprobs.size() && next.size() == words.size() &&
              backoff_logprobs.size() == contexts && final_logprobs.size() == contexts,
          "arrays of a language model that do not fit each other");
  for (size_t i = 0; i < words.size(); ++i)
    require(words.data()[i] >= 0 && words.data()[i] < kMostWords, "a word of a language model is out of range");
  g.lm.build({offsets.data(), words.data(), logprobs.data(), next.data(), backoffs.data(), backoff_logprobs.data(),
          final_logprobs.data(), int32_t(contexts), nb::cast<int32_t>(m[7])});
  for (size_t i = 0; i < 7; ++i) self->owned.push_back(nb::borrow(m[i]));
}

Options read_options(const nb::tuple& given) {
  require(given.size() == 8, "options: beam, lattice_beam, scale, max_active, min_active, delay, max_frames, max_links");
  return {nb::cast<float>(given[0]),   nb::cast<float>(given[1]),   nb::cast<float>(given[2]),
          nb::cast<int32_t>(given[3]), nb::cast<int32_t>(given[4]), nb::cast<int32_t>(given[5]),
          nb::cast<int32_t>(given[6]), nb::cast<int64_t>(given[7])};
}

nb::list listed(const std::vector<Word>& words) {
  nb::list out;
  for (const Word& word : words) out.append(nb::make_tuple(word.word, word.start, word.end, word.logprob));
  return out;
}

// The sessions of one call.
struct Work {
  std::atomic<int64_t> next{0};
  const Graph* graph;
  Options options;
  const float* scores;
  int64_t width, columns;
  const int64_t* frames;
  std::vector<Session*> sessions;
  std::vector<std::vector<Word>> fixed, tail;
};

Search& thread_search() {
  thread_local Search search;
  return search;
}

void drain(void* pointer) {
  auto& work = *static_cast<Work*>(pointer);
  Search& search = thread_search();
  search.begin(*work.graph, work.options);
  for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < int64_t(work.sessions.size());) {
    Session& session = *work.sessions[size_t(i)];
    if (session.levels.empty()) search.start(session);
    for (int64_t f = 0; f < work.frames[i]; ++f)
      search.step(session, work.scores + (i * work.width + f) * work.columns, work.fixed[size_t(i)]);
    search.tail(session, work.tail[size_t(i)]);
  }
}

nb::list step(const PyGraph& graph, const nb::list& sessions, Array<float> scores, Array<int64_t> frames,
              const nb::tuple& options, int64_t threads) {
  require(scores.ndim() == 3, "scores must be (n, frames, columns)");
  auto n = size_t(scores.shape(0)), width = size_t(scores.shape(1)), columns = size_t(scores.shape(2));
  require(int64_t(columns) >= graph.graph.width, "the graph reads more columns than the scores have");
  require(sessions.size() == n && frames.size() == n, "sessions and frames: one for each row of the scores");
  Work work;
  work.graph = &graph.graph, work.options = read_options(options), work.scores = scores.data();
  work.width = int64_t(width), work.columns = int64_t(columns), work.frames = frames.data();
  for (size_t i = 0; i < n; ++i) {
    require(frames.data()[i] >= 0 && size_t(frames.data()[i]) <= width, "frames out of range");
    work.sessions.push_back(&nb::cast<Session&>(sessions[i]));
  }
  std::vector<Session*> sorted = work.sessions;
  std::sort(sorted.begin(), sorted.end());
  require(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "no session twice");
  work.fixed.resize(n), work.tail.resize(n);
  {
    nb::gil_scoped_release release;
    const auto team = unsigned(std::clamp<int64_t>(threads, 1, std::max<int64_t>(int64_t(n), 1)));
    Team::mine().run(drain, &work, team);
  }
  nb::list out;
  for (size_t i = 0; i < n; ++i) out.append(nb::make_tuple(listed(work.fixed[i]), listed(work.tail[i])));
  return out;
}

nb::list finish(const PyGraph& graph, Session& session, const nb::tuple& options, int32_t most, double graph_scale,
                bool minimum_risk) {
  Options chosen = read_options(options);
  std::vector<Hypothesis> found;
  {
    nb::gil_scoped_release release;
    Search& search = thread_search();
    search.begin(graph.graph, chosen);
    if (session.levels.empty()) search.start(session);
    search.finish(session, most, graph_scale, minimum_risk, found);
  }
  nb::list out;
  for (const Hypothesis& each : found) out.append(nb::make_tuple(each.cost, listed(each.words)));
  return out;
}

nb::tuple lattice(const PyGraph& graph, Session& session, const nb::tuple& options) {
  Options chosen = read_options(options);
  WordLattice found;
  double least;
  {
    nb::gil_scoped_release release;
    Search& search = thread_search();
    search.begin(graph.graph, chosen);
    if (session.levels.empty()) search.start(session);
    found = search.lattice(session, least);
  }
  nb::list arcs, finals;
  for (const LatticeArc& arc : found.arcs)
    arcs.append(nb::make_tuple(arc.source, arc.target, arc.word, arc.cost, arc.graph_cost, arc.start, arc.end));
  for (size_t i = 0; i < found.final_costs.size(); ++i)
    finals.append(nb::make_tuple(found.final_costs[i], found.final_graph_costs[i]));
  return nb::make_tuple(arcs, finals, least);
}

nb::tuple minimum_risk(const nb::list& arcs, const nb::list& finals, double graph_scale,
                       const std::vector<std::vector<int32_t>>& sequences) {
  require(!sequences.empty(), "sequences: one at least");
  WordLattice lattice;
  for (nb::handle each : finals) {
    auto costs = nb::cast<nb::tuple>(each);
    require(costs.size() == 2, "finals: the cost of ending in each state and the graph's part of it");
    lattice.final_costs.push_back(nb::cast<double>(costs[0]));
    lattice.final_graph_costs.push_back(nb::cast<double>(costs[1]));
  }
  auto states = int32_t(lattice.final_costs.size());
  require(states >= 1 && std::isfinite(lattice.final_costs.back()), "a lattice whose last state is final");
  std::vector<uint8_t> entered(size_t(states), 0);
  entered[0] = 1;
  for (nb::handle each : arcs) {
    auto arc = nb::cast<nb::tuple>(each);
    require(arc.size() == 7, "arcs: source, target, word, cost, graph_cost, start, end");
    LatticeArc made{nb::cast<int32_t>(arc[0]), nb::cast<int32_t>(arc[1]), nb::cast<int32_t>(arc[2]),
                    nb::cast<double>(arc[3]),  nb::cast<double>(arc[4]),  nb::cast<int32_t>(arc[5]),
                    nb::cast<int32_t>(arc[6])};
    require(0 <= made.source && made.source < made.target && made.target < states && made.word >= 0 &&
                std::isfinite(made.cost) && std::isfinite(made.graph_cost),
            "an arc of a lattice that leads to no later state, or without a word or costs");
    entered[size_t(made.target)] = 1;
    lattice.arcs.push_back(made);
  }
  require(std::find(entered.begin(), entered.end(), 0) == entered.end(), "a state of a lattice that no arc leads to");
  std::vector<std::vector<double>> confidences;
  std::vector<Word> decoded;
  double distance;
  {
    nb::gil_scoped_release release;
    BayesRisk risk(lattice, graph_scale);
    distance = risk.evaluate(sequences.front());
    for (const std::vector<int32_t>& words : sequences) confidences.push_back(risk.confidences(words));
    decoded = risk.decode(sequences.front());
  }
  return nb::make_tuple(distance, confidences, listed(decoded));
}

// --- saved sessions ---------------------------------------------------------------------------------------

struct SavedHeader {
  int64_t frames, base_frame, owed, first_lm, tokens, levels, nodes, links;
  double offset;
  float adaptive, unused;
};
struct SavedLevel {
  int32_t nodes, emitting, epsilon;
};

nb::bytes export_session(const Session& s) {
  SavedHeader header{s.frames, s.base_frame, s.owed, s.first_lm, int64_t(s.frontier.size()), int64_t(s.levels.size()),
                     int64_t(s.nodes.size()), int64_t(s.links.size()), s.offset, s.adaptive, 0};
  std::vector<char> out;
  auto write = [&](const void* data, size_t bytes) {
    out.insert(out.end(), static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
  };
  write(&header, sizeof header);
  write(s.frontier.data(), s.frontier.size() * sizeof(Token));
  for (const Level& level : s.levels) {
    SavedLevel saved{level.nodes, level.emitting, level.epsilon};
    write(&saved, sizeof saved);
  }
  for (const Node& node : s.nodes) write(&node.extra, sizeof node.extra);
  write(s.links.data(), s.links.size() * sizeof(Link));
  return nb::bytes(out.data(), out.size());
}

void import_session(Session& out, const PyGraph& graph, const nb::bytes& data) {
  const Graph& g = graph.graph;
  const char *at = data.c_str(), *end = at + data.size();
  auto read = [&](void* to, int64_t count, size_t bytes) {
    require(count >= 0 && count <= int64_t(size_t(end - at) / bytes), "a saved search that ends too early");
    if (count) std::memcpy(to, at, size_t(count) * bytes);
    at += size_t(count) * bytes;
  };
  SavedHeader header;
  read(&header, 1, sizeof header);
  int64_t most = int64_t(data.size());
  require(header.tokens >= 1 && header.levels >= 1 && header.nodes >= 1 && header.links >= 0 &&
              header.tokens <= most && header.levels <= most && header.nodes <= most && header.links <= most &&
              header.base_frame >= 0 && header.frames == header.base_frame + header.levels - 1 &&
              header.frames < int64_t(1) << 31 && std::abs(header.owed) <= header.frames &&
              header.first_lm >= 0 && header.first_lm < (g.has_lm ? g.lm.model().states : 1) &&
              std::isfinite(header.offset) && header.adaptive >= 0,
          "numbers of a saved search that cannot be");
  Session s;
  s.frames = header.frames, s.base_frame = header.base_frame, s.owed = int32_t(header.owed);
  s.first_lm = int32_t(header.first_lm);
  s.offset = header.offset, s.adaptive = header.adaptive;
  s.frontier.resize(size_t(header.tokens));
  read(s.frontier.data(), header.tokens, sizeof(Token));
  for (const Token& token : s.frontier)
    require(token.state >= 0 && size_t(token.state) < g.states.size() && token.lm >= 0 &&
                token.lm < (g.has_lm ? g.lm.model().states : 1) && std::isfinite(token.cost),
            "a token of a saved search is out of range");
  int64_t nodes = 0, links = 0;
  for (int64_t l = 0; l < header.levels; ++l) {
    SavedLevel saved;
    read(&saved, 1, sizeof saved);
    require(saved.nodes >= 1 && saved.emitting >= 0 && saved.epsilon >= 0 && (l || !saved.emitting),
            "a level of a saved search is out of range");
    s.levels.push_back({nodes, links, saved.nodes, saved.emitting, saved.epsilon});
    nodes += saved.nodes, links += int64_t(saved.emitting) + saved.epsilon;
  }
  require(nodes == header.nodes && links == header.links && s.levels.back().nodes == header.tokens,
          "levels of a saved search that do not agree with its numbers");
  s.nodes.resize(size_t(nodes), {0, -1}), s.links.resize(size_t(links));
  for (Node& node : s.nodes) {
    read(&node.extra, 1, sizeof node.extra);
    require(node.extra == -1 || (node.extra >= 0 && node.extra < kInf), "a node of a saved search is out of range");
  }
  read(s.links.data(), links, sizeof(Link));
  require(at == end, "a saved search with bytes behind it");
  std::vector<uint8_t> left;  // whether an epsilon link of the level left the node
  for (size_t l = 0; l < s.levels.size(); ++l) {
    const Level& level = s.levels[l];
    left.assign(size_t(level.nodes), 0);
    Node* own = s.nodes.data() + level.node;
    for (int32_t i = 0; i < level.emitting + level.epsilon; ++i) {
      const Link& link = s.links[size_t(level.link + i)];
      int32_t sources = i < level.emitting ? s.levels[l - 1].nodes : level.nodes;
      require(link.source >= 0 && link.source < sources && link.target >= 0 && link.target < level.nodes &&
                  link.arc >= -1 && link.arc < int32_t(g.arcs.size()) && link.excess >= 0 && link.excess < kInf &&
                  (link.arc < 0 || (g.arcs[size_t(link.arc)].column >= 0) == (i < level.emitting)),
              "a link of a saved search is out of range");
      if (i >= level.emitting) {
        left[size_t(link.source)] = 1;
        require(!left[size_t(link.target)], "a link of a saved search leads back to a node that links left before");
      }
      if (link.excess == 0 && own[link.target].best < 0) own[link.target].best = i;
    }
    int32_t beginnings = 0;
    for (int32_t n = 0; n < level.nodes; ++n) {
      int32_t node = n, hops = 0;
      while (own[node].best >= level.emitting && hops++ <= level.nodes)
        node = s.links[size_t(level.link + own[node].best)].source;
      require(hops <= level.nodes && (l == 0 || own[node].best >= 0), "a path of a saved search has no beginning");
      beginnings += l == 0 && own[n].best < 0;
    }
    require(l || beginnings == 1, "a saved search has more than one beginning");
  }
  out = std::move(s);
}

}  // namespace

NB_MODULE(_wfst, m) {
  m.doc() = "Search of decoding graphs; asr_serve.kernels.wfst_reference is the same in Python.";
  nb::class_<PyGraph>(m, "Graph")
      .def("__init__", &make_graph, nb::arg("arc_offsets").noconvert(), nb::arg("epsilon_offsets").noconvert(),
           nb::arg("arc_labels").noconvert(), nb::arg("arc_words").noconvert(), nb::arg("arc_costs").noconvert(),
           nb::arg("arc_bounds").noconvert(), nb::arg("arc_states").noconvert(), nb::arg("final_costs").noconvert(),
           nb::arg("label_columns").noconvert(), nb::arg("label_phones").noconvert(),
           nb::arg("phone_boundaries").noconvert(), nb::arg("depths").noconvert(), nb::arg("start_state"),
           nb::arg("language_model") = nb::none());
  nb::class_<Session>(m, "Session")
      .def(nb::init<>())
      .def_ro("frames", &Session::frames)
      .def_prop_ro("tokens", [](const Session& s) { return s.frontier.size(); })
      .def_prop_ro("history", [](const Session& s) { return nb::make_tuple(s.levels.size(), s.links.size()); })
      .def("export_state", &export_session)
      .def("import_state", &import_session, nb::arg("graph"), nb::arg("data"));
  m.def("step", &step, nb::arg("graph"), nb::arg("sessions"), nb::arg("scores").noconvert(),
        nb::arg("frames").noconvert(), nb::arg("options"), nb::arg("threads"),
        "One chunk of many sessions: the words fixed by it, and the rest of the best path, of each.");
  m.def("finish", &finish, nb::arg("graph"), nb::arg("session"), nb::arg("options"), nb::arg("most"),
        nb::arg("graph_scale"), nb::arg("minimum_risk"), "Hypotheses of a session that has ended.");
  m.def("lattice", &lattice, nb::arg("graph"), nb::arg("session"), nb::arg("options"),
        "Arcs and final costs of the word lattice of a session that has ended, and the cost of the whole best path.");
  m.def("minimum_risk", &minimum_risk, nb::arg("arcs"), nb::arg("finals"), nb::arg("graph_scale"),
        nb::arg("sequences"),
        "Expected edit distance of the first of some word sequences, the confidences of the words of each, and the "
        "words of minimum Bayes risk from the first on.");
}
