// Token passing over a weighted transducer that is composed with an n-gram model on the way, with word lattices.
//
// A session's frontier holds a token for each pair of a graph state and a language model state that survived the last
// frame. Its history holds a level of nodes for each frame (one for each token of that frame that still matters) and
// the links between them. A link's excess is how much dearer the best path to its end becomes if it takes this link:
// 0 for the best link of a node. The cost of any path is that of the best path to its end plus the excesses of its
// links, so neither costs nor scores are kept.
//
// kernels/wfst_reference.py does the same in Python, with the same results to the last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lattice.hpp"
#include "ngram.hpp"

namespace asr_serve::wfst {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kPruneFrames = 10;    // frames between two prunings of the history
constexpr float kBeamDelta = 0.5f;      // added to a beam that a limit of tokens made smaller
constexpr int64_t kMaxSteps = 200'000;  // bound on the work of an n-best list
constexpr size_t kMaxLatticeArcs = 1 << 12, kMaxLatticeTraces = 1 << 20;  // bounds on a lattice and the work for it
constexpr double kMaxNarrowedBeam = 16, kMinNarrowedBeam = 1e-3;  // of a lattice that was too large with its own beam
constexpr double kCostSteps = 1024;     // costs that differ by less than one of so many steps are equal in a lattice

constexpr size_t kPrefetch = 8;  // tokens or arcs ahead whose memory is asked for

enum Boundary : int8_t { kNonword, kBegin, kEnd, kInternal, kSingleton };

struct Arc {
  int32_t column, word;  // -1: consumes no frame; outputs no word
  float cost;
  int32_t next;
};

struct State {
  int32_t first, epsilon, end;  // arcs: consuming ones, then epsilon arcs
  int32_t depth;                // rank in the order of epsilon arcs
};

// As much of an arc as decides whether a token follows it, for the loop that reads most arcs.
struct PackedArc {
  float bound;      // at most the arc's cost with that of its word; rising among a state's arcs of a kind
  int32_t column;   // as in Arc
  uint32_t target;  // next state, and the bits below

  static constexpr uint32_t kOwnCost = 1u << 31;  // the bound is not the whole cost
  static constexpr uint32_t kEpsilon = 1u << 30;  // epsilon arcs leave the next state
  static int32_t next(uint32_t target) { return int32_t(target & (kEpsilon - 1)); }
};

struct Graph {
  std::vector<Arc> arcs;
  std::vector<PackedArc> packed;  // of each arc
  std::vector<State> states;
  std::vector<float> final_costs;
  std::vector<int32_t> labels, phones;  // of each arc; of each label
  std::vector<int8_t> boundaries;       // of each phone; none: words are not marked
  int32_t start, width;                 // state; columns of the scores that are read
  bool has_lm;
  IndexedNgram lm;

  int8_t kind(int32_t label) const {
    int32_t phone = phones[size_t(label)];
    return phone >= 0 && size_t(phone) < boundaries.size() ? boundaries[size_t(phone)] : int8_t(kNonword);
  }
  bool marked() const { return !boundaries.empty(); }
  bool loops(int32_t arc) const {  // whether the arc leads back to its own state
    const State& s = states[size_t(arcs[size_t(arc)].next)];
    return arc >= s.first && arc < s.end;
  }
};

struct Options {
  float beam, lattice_beam, scale;
  int32_t max_active, min_active;
  int32_t delay;       // frames that words stay open although all tokens share them
  int32_t max_frames;  // frames of history, and links of it, at which words are fixed by force
  int64_t max_links;
};

struct Token {
  int32_t state, lm;
  float cost;
};

struct Link {
  int32_t source, target;  // nodes: of the level before, or of the same level for an epsilon arc; and of the level
  int32_t arc;             // -1: a frame that no arc could consume
  float excess;
};

struct Level {
  int64_t node, link;  // where they begin
  int32_t nodes, emitting, epsilon;
};

struct Node {
  float extra;   // cost of the best path through it above that of the best path, among paths to the frontier
  int32_t best;  // its best link, counted from the level's first; -1 for a beginning
};

struct Hypothesis {
  double cost;
  std::vector<Word> words;
};

struct Session {
  std::vector<Token> frontier;
  std::vector<Level> levels;
  std::vector<Node> nodes;
  std::vector<Link> links;
  int64_t frames = 0;      // consumed
  int64_t base_frame = 0;  // consumed before levels[0]
  double offset = 0;       // cost that was taken off the tokens' costs
  int32_t owed = 0;        // words that were output before levels[0] less those begun; 0 but after a forced fix
  int32_t first_lm = 0;    // language model state of the node with which levels[0] begins
  float adaptive = 0;      // beam of the next frame
};

// Table from (state, language model state) to a token, for one frame.
class TokenTable {
 public:
  void clear() {
    if (slots_.empty()) slots_.resize(1 << 12);
    if (++stamp_ == 0) {
      std::fill(slots_.begin(), slots_.end(), Slot{});
      stamp_ = 1;
    }
    used_ = 0;
  }
  // The place of the key's token; -1 there means that the key is new.
  int32_t& find(int32_t state, int32_t lm) {
    if (2 * used_ >= slots_.size()) grow();
    uint64_t key = key_of(state, lm);
    Slot& slot = place(key);
    if (slot.stamp != stamp_) slot = {key, stamp_, -1}, ++used_;
    return slot.token;
  }
  void prefetch(int32_t state, int32_t lm) const { __builtin_prefetch(&slots_[first(key_of(state, lm))]); }

 private:
  struct Slot {
    uint64_t key;
    uint32_t stamp;
    int32_t token;
  };
  static uint64_t key_of(int32_t state, int32_t lm) { return uint64_t(uint32_t(state)) << 32 | uint32_t(lm); }
  size_t first(uint64_t key) const { return (key * 0x9E3779B97F4A7C15ull >> 32) & (slots_.size() - 1); }
  Slot& place(uint64_t key) {
    size_t mask = slots_.size() - 1, at = first(key);
    while (slots_[at].stamp == stamp_ && slots_[at].key != key) at = (at + 1) & mask;
    return slots_[at];
  }
  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.stamp == stamp_) place(slot.key) = slot;
  }
  std::vector<Slot> slots_;
  uint32_t stamp_ = 0;
  size_t used_ = 0;
};

// What a thread needs for any session; nothing in it outlives a call.
class Search {
 public:
  void begin(const Graph& graph, const Options& options) { graph_ = &graph, options_ = &options; }

  void start(Session& s) {
    s = Session{};
    if (graph_->has_lm) s.first_lm = graph_->lm.model().start_state;
    table_.clear(), tokens_.clear(), links_.clear();
    const State& first = graph_->states[size_t(graph_->start)];
    insert(graph_->start, s.first_lm, 0.0f, first.epsilon < first.end);
    candidates_count_ = 0, targets_.clear();
    close(kInf);
    finish_frame(s);
  }

  // One frame: scores of every column, log-likelihoods. Words that became certain are appended to `fixed`.
  void step(Session& s, const float* scores, std::vector<Word>& fixed) {
    negate(scores);
    table_.clear(), tokens_.clear(), links_.clear();
    float best = kInf;
    size_t at = 0;
    for (size_t i = 0; i < s.frontier.size(); ++i)
      if (s.frontier[i].cost < best) best = s.frontier[i].cost, at = i;
    float cutoff = kInf;
    candidates_count_ = 0, words_ahead_.clear();
    expand(s.frontier[at], -1, best, s.adaptive, cutoff);
    candidates_count_ = 0, words_ahead_.clear();  // the best token alone, for a cutoff
    size_t tokens = s.frontier.size();
    for (size_t i = 0; i < tokens; ++i) {
      if (i + 2 * kPrefetch < tokens) prefetch(&graph_->states[size_t(s.frontier[i + 2 * kPrefetch].state)]);
      if (i + kPrefetch < tokens)
        prefetch(&graph_->packed[size_t(graph_->states[size_t(s.frontier[i + kPrefetch].state)].first)]);
      expand(s.frontier[i], int32_t(i), best, s.adaptive, cutoff);
    }
    targets_.assign(candidates_count_, -1);
    look_up_words(s, best, cutoff);
    insert_candidates(cutoff);
    ++s.frames;
    if (tokens_.empty()) {  // no arc can consume this frame
      candidates_.resize(std::max(candidates_.size(), tokens)), candidates_count_ = 0, targets_.clear();
      for (size_t i = 0; i < tokens; ++i) {
        const Token& token = s.frontier[i];
        candidates_[candidates_count_++] = {token.cost - best, int32_t(i), -1, token.lm, uint32_t(token.state)};
        targets_.push_back(insert(token.state, token.lm, token.cost - best, false));
      }
    } else {
      close(cutoff);
    }
    s.offset += best;
    finish_frame(s);
    if (s.frames % kPruneFrames == 0) {
      extras_.assign(s.frontier.size(), 0.0f);
      prune(s);
      fix(s, fixed);
    }
  }

  // Words of the best path that are not fixed.
  void tail(const Session& s, std::vector<Word>& words) {
    trace(s, best_token(s), path_);
    to_words(s, path_, words);
    if (words.empty()) return;
    compute_posteriors(s);
    set_logprobs(s, path_, words);
  }

  // Hypotheses after the fixed words, each with other words; one at least. The first has the words of minimum Bayes
  // risk where `minimum_risk`, and the others, or all, come best first.
  void finish(Session& s, int32_t most, double graph_scale, bool minimum_risk, std::vector<Hypothesis>& out) {
    out.clear();
    prune_ends(s);
    find_nbest(s, most, out);
    std::vector<int32_t> ids;
    auto set_ids = [&](const std::vector<Word>& words) {
      ids.clear();
      for (const Word& word : words) ids.push_back(word.word);
    };
    WordLattice lattice = make_lattice(s);
    BayesRisk risk(lattice, graph_scale);
    for (Hypothesis& each : out) {
      set_ids(each.words);
      std::vector<double> logprobs = risk.confidences(ids);
      for (size_t i = 0; i < logprobs.size(); ++i) each.words[i].logprob = logprobs[i];
    }
    if (!minimum_risk) return;
    set_ids(out.front().words);
    std::vector<Word> words = risk.decode(ids);
    auto same = [&](const Hypothesis& each) {
      return std::equal(each.words.begin(), each.words.end(), words.begin(), words.end(),
                        [](const Word& a, const Word& b) { return a.word == b.word; });
    };
    auto known = std::find_if(out.begin(), out.end(), same);
    if (known != out.end()) {
      std::rotate(out.begin(), known, known + 1);
      return;
    }
    double cost = least_cost(s) + cost_of(lattice, words);
    out.insert(out.begin(), Hypothesis{cost, std::move(words)});
    if (int32_t(out.size()) > most) out.pop_back();
  }

  // The session's paths after the fixed words, as a lattice of words. `least`: the cost of the whole best path.
  WordLattice lattice(Session& s, double& least) {
    prune_ends(s);
    least = least_cost(s);
    return make_lattice(s);
  }

 private:
  struct Step {
    int32_t level;
    int64_t link;  // index into the session's links
  };

  // An arc that a token may follow, before the tokens of the frame are told apart.
  struct Candidate {
    float cost;
    int32_t source, arc, lm;
    uint32_t target;  // as in PackedArc
  };

  // Costs of the columns: the scores, negated and scaled, and the least of them.
  void negate(const float* scores) {
    constexpr size_t kLanes = 16;  // so that the compiler makes vector code of a minimum
    auto width = size_t(graph_->width);
    negated_.resize(width);
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, kInf);
    size_t c = 0;
    for (; c + kLanes <= width; c += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) {
        float cost = -options_->scale * scores[c + lane];
        negated_[c + lane] = cost;
        lanes[lane] = cost < lanes[lane] ? cost : lanes[lane];
      }
    least_ = kInf;
    for (; c < width; ++c) least_ = std::min(least_, negated_[c] = -options_->scale * scores[c]);
    for (float lane : lanes) least_ = std::min(least_, lane);
  }

  // Candidates of a token whose cost is counted from `best`; the cutoff falls with the cheapest one. Where the language
  // model is to tell the cost of a word, the candidate's is the least that it may be.
  void expand(const Token& token, int32_t source, float best, float adaptive, float& cutoff) {
    const State& s = graph_->states[size_t(token.state)];
    size_t count = candidates_count_, most = count + size_t(s.epsilon - s.first);
    if (candidates_.size() < most) candidates_.resize(2 * most);
    Candidate* out = candidates_.data();
    const PackedArc* arcs = graph_->packed.data();
    const float *negated = negated_.data(), cost = token.cost - best, least = least_;
    float limit = cutoff;
    for (int32_t a = s.first; a < s.epsilon; ++a) {
      const PackedArc arc = arcs[a];
      float bound = cost + arc.bound;
      if (bound + least > limit) break;
      float total = bound + negated[arc.column];
      if (arc.target & PackedArc::kOwnCost) {
        if (!(total <= limit)) continue;
        words_ahead_.push_back(int32_t(count));
        out[count++] = {total, source, a, token.lm, arc.target};
        continue;
      }
      out[count] = {total, source, a, token.lm, arc.target};
      count += (total <= limit) & (total < kInf);  // without a branch, which would be guessed wrongly
      float next = total + adaptive;
      limit = next < limit ? next : limit;
    }
    cutoff = limit, candidates_count_ = count;
  }

  // Sets the costs of candidates that output words; the cutoff falls with the cheapest one.
  void look_up_words(const Session& s, float best, float& cutoff) {
    for (size_t i = 0; i < words_ahead_.size(); ++i) {
      Candidate& c = candidates_[size_t(words_ahead_[i])];
      if (c.cost > cutoff) continue;
      const Arc& arc = graph_->arcs[size_t(c.arc)];
      float total = s.frontier[size_t(c.source)].cost - best + arc.cost + negated_[size_t(arc.column)];
      if (arc.word >= 0 && graph_->has_lm) total -= graph_->lm.step(c.lm, arc.word, c.lm);
      c.cost = total < kInf ? total : kInf;
      cutoff = std::min(cutoff, c.cost + s.adaptive);
    }
  }

  void insert_candidates(float cutoff) {
    for (size_t i = 0; i < candidates_count_; ++i) {
      const Candidate& c = candidates_[i];
      if (i + kPrefetch < candidates_count_) {
        const Candidate& later = candidates_[i + kPrefetch];
        table_.prefetch(PackedArc::next(later.target), later.lm);
      }
      if (c.cost > cutoff || !(c.cost < kInf)) continue;
      targets_[i] = insert(PackedArc::next(c.target), c.lm, c.cost, c.target & PackedArc::kEpsilon);
    }
  }

  static void prefetch(const void* at) { __builtin_prefetch(at); }

  // `epsilon`: whether epsilon arcs leave the state, and are to be followed.
  int32_t insert(int32_t state, int32_t lm, float cost, bool epsilon) {
    int32_t& place = table_.find(state, lm);
    if (place < 0) {
      place = int32_t(tokens_.size());
      tokens_.push_back({state, lm, cost});
      if (epsilon) {
        auto depth = size_t(graph_->states[size_t(state)].depth);
        if (waiting_.size() <= depth) waiting_.resize(depth + 1);
        waiting_[depth].push_back(place);
      }
      return place;
    }
    Token& token = tokens_[size_t(place)];
    if (cost < token.cost) token.cost = cost;
    return place;
  }

  // Epsilon arcs, by the order of their states: the cost of a token is final when its arcs are followed.
  void close(float cutoff) {
    for (size_t depth = 0; depth < waiting_.size(); ++depth) {
      epsilon_.clear();
      for (int32_t source : waiting_[depth]) {
        const Token& token = tokens_[size_t(source)];
        if (token.cost > cutoff) continue;
        const State& s = graph_->states[size_t(token.state)];
        for (int32_t a = s.epsilon; a < s.end; ++a) {
          const PackedArc& arc = graph_->packed[size_t(a)];
          float bound = token.cost + arc.bound;
          if (bound > cutoff) break;
          epsilon_.push_back({token.cost, source, a, token.lm, arc.target});
        }
      }
      for (size_t i = 0; i < epsilon_.size(); ++i) {
        const Candidate& c = epsilon_[i];
        const Arc& arc = graph_->arcs[size_t(c.arc)];
        float total = c.cost + arc.cost;
        int32_t lm = c.lm;
        if (arc.word >= 0 && graph_->has_lm) total -= graph_->lm.step(c.lm, arc.word, lm);
        if (total > cutoff || !(total < kInf)) continue;
        links_.push_back({c.source, insert(arc.next, lm, total, c.target & PackedArc::kEpsilon), c.arc, total});
      }
      waiting_[depth].clear();
    }
  }

  // The dearest token to keep; sets the beam of the next frame. As Kaldi's LatticeFasterDecoder::GetCutoff.
  float choose_cutoff(float& adaptive) {
    const Options& o = *options_;
    costs_.resize(tokens_.size());
    for (size_t i = 0; i < tokens_.size(); ++i) costs_[i] = tokens_[i].cost;
    float best = kInf;
    for (float cost : costs_) best = cost < best ? cost : best;
    float by_beam = best + o.beam;
    int32_t within = 0;
    for (float cost : costs_) within += cost <= by_beam;
    auto nth = [&](int32_t n) {
      std::nth_element(costs_.begin(), costs_.begin() + n, costs_.end());
      return costs_[size_t(n)];
    };
    if (within > o.max_active) {
      float limit = nth(o.max_active);
      if (limit < by_beam) {
        adaptive = limit - best + kBeamDelta;
        return limit;
      }
    }
    if (within <= o.min_active) {
      float limit = int64_t(tokens_.size()) > o.min_active ? nth(o.min_active) : kInf;
      if (limit > by_beam) {
        adaptive = limit < kInf ? limit - best + kBeamDelta : kInf;
        return limit;
      }
    }
    adaptive = o.beam;
    return by_beam;
  }

  // Keeps the tokens below the cutoff as the frontier, and the links that a lattice may need. Tokens are in the order
  // of the first links that lead to them.
  void finish_frame(Session& s) {
    constexpr int32_t kDropped = -1, kUnnumbered = -2;
    float cutoff = choose_cutoff(s.adaptive);
    map_.resize(tokens_.size());
    for (size_t i = 0; i < tokens_.size(); ++i) map_[i] = tokens_[i].cost <= cutoff ? kUnnumbered : kDropped;
    for (size_t i = links_.size(); i-- > 0;) {  // an epsilon arc of negative cost may lead below the cutoff
      const Link& link = links_[i];
      if (map_[size_t(link.target)] == kUnnumbered && link.excess == tokens_[size_t(link.target)].cost)
        map_[size_t(link.source)] = kUnnumbered;
    }
    Level level{int64_t(s.nodes.size()), int64_t(s.links.size()), 0, 0, 0};
    s.frontier.clear();
    auto number = [&](int32_t target) {
      map_[size_t(target)] = level.nodes++;
      s.frontier.push_back(tokens_[size_t(target)]);
      s.nodes.push_back({-1.0f, -1});
    };
    if (s.levels.empty()) number(0);
    kept_.resize(std::max(kept_.size(), candidates_count_ + links_.size()));
    int32_t count = 0;
    auto add = [&](int32_t source, int32_t target, int32_t arc, float cost) {
      if (map_[size_t(target)] == kDropped) return;
      float excess = cost - tokens_[size_t(target)].cost;
      if (excess > options_->lattice_beam) return;
      if (map_[size_t(target)] == kUnnumbered) number(target);
      Node& node = s.nodes[size_t(level.node + map_[size_t(target)])];
      if (excess == 0 && node.best < 0) node.best = count;
      kept_[size_t(count++)] = {source, map_[size_t(target)], arc, excess};
    };
    for (size_t i = 0; i < candidates_count_; ++i)
      if (targets_[i] >= 0) add(candidates_[i].source, targets_[i], candidates_[i].arc, candidates_[i].cost);
    level.emitting = count;
    for (const Link& link : links_)
      if (map_[size_t(link.source)] >= 0) add(map_[size_t(link.source)], link.target, link.arc, link.excess);
    level.epsilon = count - level.emitting;
    s.links.insert(s.links.end(), kept_.begin(), kept_.begin() + count);
    s.levels.push_back(level);
  }

  // Drops what lies on no path within the lattice beam, from the end, whose tokens' extra costs are in `extras_`, back
  // to where nothing changes.
  void prune(Session& s) {
    auto last = int64_t(s.levels.size()) - 1;
    int64_t lowest = last;
    for (int64_t l = last;; --l) {
      Level& level = s.levels[size_t(l)];
      Link* links = s.links.data() + level.link;
      Node* nodes = s.nodes.data() + level.node;
      for (int32_t i = level.emitting + level.epsilon; i-- > level.emitting;) {
        float extra = extras_[size_t(links[i].target)] + links[i].excess;
        float& at = extras_[size_t(links[i].source)];
        if (extra < at && extra <= options_->lattice_beam) at = extra;
      }
      bool changed = false;
      for (int32_t n = 0; n < level.nodes; ++n) changed |= nodes[n].extra != extras_[size_t(n)];
      if (!changed && l < last) break;  // its nodes keep their numbers, so the links behind it are right
      lowest = l;
      map_.assign(size_t(level.nodes), -1);
      int32_t kept = 0;
      for (int32_t n = 0; n < level.nodes; ++n)
        if (extras_[size_t(n)] < kInf) {
          if (l == last) {
            s.frontier[size_t(kept)] = s.frontier[size_t(n)];
            if (size_t(n) < final_.size())
              final_[size_t(kept)] = final_[size_t(n)], final_graph_[size_t(kept)] = final_graph_[size_t(n)];
          }
          map_[size_t(n)] = kept, nodes[kept++] = {extras_[size_t(n)], -1};
        }
      if (l == last) s.frontier.resize(size_t(kept)), final_.resize(size_t(kept), kInf), final_graph_.resize(size_t(kept));
      if (l < last) {
        Level& next = s.levels[size_t(l) + 1];
        Link* behind = s.links.data() + next.link;
        for (int32_t i = 0; i < next.emitting; ++i) behind[i].source = map_[size_t(behind[i].source)];
      }
      before_.assign(l ? size_t(s.levels[size_t(l) - 1].nodes) : 0, kInf);
      int32_t count = 0, emitting = 0;
      for (int32_t i = 0; i < level.emitting + level.epsilon; ++i) {
        Link link = links[i];
        bool emits = i < level.emitting;
        float extra = extras_[size_t(link.target)] + link.excess;
        if (!(extra <= options_->lattice_beam && extra < kInf)) continue;
        link.target = map_[size_t(link.target)];
        if (emits)
          before_[size_t(link.source)] = std::min(before_[size_t(link.source)], extra), ++emitting;
        else
          link.source = map_[size_t(link.source)];
        if (link.excess == 0 && nodes[link.target].best < 0) nodes[link.target].best = count;
        links[count++] = link;
      }
      level.nodes = kept, level.emitting = emitting, level.epsilon = count - emitting;
      extras_.swap(before_);
      if (!l) break;
    }
    squeeze(s, lowest);
  }

  // Closes the gaps behind a level's nodes and links.
  static void squeeze(Session& s, int64_t from) {
    int64_t node = from ? s.levels[size_t(from)].node : 0, link = from ? s.levels[size_t(from)].link : 0;
    for (size_t l = size_t(from); l < s.levels.size(); ++l) {
      Level& level = s.levels[l];
      std::copy_n(s.nodes.begin() + level.node, level.nodes, s.nodes.begin() + node);
      std::copy_n(s.links.begin() + level.link, level.emitting + level.epsilon, s.links.begin() + link);
      level.node = node, level.link = link;
      node += level.nodes, link += level.emitting + level.epsilon;
    }
    s.nodes.resize(size_t(node)), s.links.resize(size_t(link));
  }


  static int32_t best_token(const Session& s) {
    int32_t best = 0;
    for (size_t i = 1; i < s.frontier.size(); ++i)
      if (s.frontier[i].cost < s.frontier[size_t(best)].cost) best = int32_t(i);
    return best;
  }

  // Words that all tokens share, and, where the history is too long, words that the best one has.
  void fix(Session& s, std::vector<Word>& fixed) {
    int32_t level = std::min(converged(s), int32_t(s.levels.size()) - 1 - options_->delay);
    if (level > 0) cut(s, level, false, fixed);
    while (s.levels.size() > 4 && (int64_t(s.levels.size()) > options_->max_frames ||
                                   int64_t(s.links.size()) > options_->max_links))
      cut(s, int32_t(s.levels.size() / 2), true, fixed);
  }

  // The last level at which the best paths to all tokens pass through one node; -1: none.
  int32_t converged(const Session& s) {
    reached_.clear();
    for (int32_t n = 0; n < s.levels.back().nodes; ++n) reached_.push_back(n);
    auto l = int32_t(s.levels.size()) - 1;
    for (; l > 0 && reached_.size() > 1; --l) {
      seen_.assign(size_t(s.levels[size_t(l) - 1].nodes), 0);
      size_t count = 0;
      for (int32_t node : reached_) {
        int32_t source = s.links[size_t(entering_link(s, l, node))].source;
        if (!seen_[size_t(source)]) seen_[size_t(source)] = 1, reached_[count++] = source;
      }
      reached_.resize(count);
    }
    return reached_.size() == 1 ? l : -1;
  }

  // The link by which the best path to a node of level l > 0 enters the level.
  static int64_t entering_link(const Session& s, int32_t l, int32_t node) {
    const Level& level = s.levels[size_t(l)];
    for (;;) {
      int32_t best = s.nodes[size_t(level.node + node)].best;
      if (best < level.emitting) return level.link + best;
      node = s.links[size_t(level.link + best)].source;
    }
  }

  // The best path to a token, from the history's beginning.
  static void trace(const Session& s, int32_t node, std::vector<Step>& path) {
    path.clear();
    for (auto l = int32_t(s.levels.size()) - 1; l >= 0;) {
      const Level& level = s.levels[size_t(l)];
      int32_t best = s.nodes[size_t(level.node + node)].best;
      if (best < 0) break;
      path.push_back({l, level.link + best});
      node = s.links[size_t(level.link + best)].source;
      l -= best < level.emitting;
    }
    std::reverse(path.begin(), path.end());
  }

  // Spans of the words of a path, by the places of its phones in words: the n-th word that a path outputs is the n-th
  // whose phones it passes, though it may be output before or after them.
  class WordSpans {
   public:
    // Adds an arc that consumes `frame`; returns whether nothing of a word before it can follow.
    bool add(const Graph& graph, int32_t arc, int32_t frame) {
      int32_t label = graph.labels[size_t(arc)];
      int8_t kind = graph.kind(label);
      bool begins = !graph.loops(arc) && (graph.phones[size_t(label)] != phone_ || label == first_);
      if (begins) first_ = label, phone_ = graph.phones[size_t(label)];
      if (begins && (kind == kBegin || kind == kSingleton)) spans.push_back({frame, 0});
      if ((kind == kEnd || kind == kSingleton) && !spans.empty()) spans.back().second = frame + 1;
      return begins && kind != kInternal && kind != kEnd;
    }
    bool between() const { return spans.empty() || spans.back().second; }
    std::vector<std::pair<int32_t, int32_t>> spans;  // frames: first, and end, 0 until it is known

   private:
    int32_t first_ = -1, phone_ = -1;  // label with which the phone began, and the phone
  };

  bool emits(const Session& s, const Step& step) const {
    const Level& level = s.levels[size_t(step.level)];
    return step.link < level.link + level.emitting;
  }

  void to_words(const Session& s, const std::vector<Step>& path, std::vector<Word>& words) const {
    words.clear();
    WordSpans phones;
    for (const Step& step : path) {
      int32_t index = s.links[size_t(step.link)].arc;
      if (index < 0) continue;
      const Arc& arc = graph_->arcs[size_t(index)];
      auto frame = int32_t(std::max<int64_t>(s.base_frame + step.level - 1, 0));
      if (arc.column >= 0 && graph_->marked()) phones.add(*graph_, index, frame);
      if (arc.word >= 0) words.push_back({arc.word, frame, frame + 1, 0.0});
    }
    for (size_t i = 0; i < words.size(); ++i) {
      int64_t group = int64_t(i) + s.owed;
      if (group < 0 || group >= int64_t(phones.spans.size())) continue;
      auto [first, end] = phones.spans[size_t(group)];
      words[i].start = first, words[i].end = end ? end : int32_t(s.frames);
    }
  }

  // Fixes the words of the best path, up to the last place between two words at or before a level. `forced`: up to
  // that level where there is none; the times of a word that is cut are then those of its output.
  void cut(Session& s, int32_t level, bool forced, std::vector<Word>& fixed) {
    trace(s, best_token(s), path_);
    WordSpans phones;
    size_t place = 0, count = 0;  // steps and words before the place
    int32_t words = 0, owed = 0;
    for (size_t i = 0; i < path_.size() && path_[i].level <= level; ++i) {
      int32_t arc = s.links[size_t(path_[i].link)].arc;
      if (arc < 0) continue;
      if (emits(s, path_[i])) {
        bool whole = phones.between() && int64_t(phones.spans.size()) == words + s.owed;
        bool begins = !graph_->marked() || phones.add(*graph_, arc, 0);
        if (begins && (whole || !graph_->marked()) && path_[i].level > 1) place = i, count = size_t(words);
      }
      words += graph_->arcs[size_t(arc)].word >= 0;
    }
    if (!place && forced) {
      while (path_[place].level < level || !emits(s, path_[place])) ++place;
      WordSpans begun;
      for (size_t i = 0; i < place; ++i) {
        int32_t arc = s.links[size_t(path_[i].link)].arc;
        if (arc < 0) continue;
        if (emits(s, path_[i]) && graph_->marked()) begun.add(*graph_, arc, 0);
        count += graph_->arcs[size_t(arc)].word >= 0;
      }
      if (graph_->marked()) owed = s.owed + int32_t(count) - int32_t(begun.spans.size());
    }
    if (!place) return;
    if (count) {
      to_words(s, path_, words_);
      compute_posteriors(s);
      set_logprobs(s, path_, words_);
      fixed.insert(fixed.end(), words_.begin(), words_.begin() + int64_t(count));
    }
    s.owed = owed;
    for (size_t i = 0; i < place && graph_->has_lm; ++i) {
      int32_t arc = s.links[size_t(path_[i].link)].arc, word = arc < 0 ? -1 : graph_->arcs[size_t(arc)].word;
      if (word >= 0) graph_->lm.step(s.first_lm, word, s.first_lm);
    }
    drop_before(s, path_[place].level - 1, s.links[size_t(path_[place].link)].source);
  }

  // Begins the history at one node of a level, and drops nodes and tokens whose best paths do not pass it.
  void drop_before(Session& s, int32_t from, int32_t node) {
    before_map_.clear();
    for (size_t l = size_t(from); l < s.levels.size(); ++l) {
      Level& level = s.levels[l];
      Link* links = s.links.data() + level.link;
      Node* nodes = s.nodes.data() + level.node;
      bool first = l == size_t(from), last = l + 1 == s.levels.size();
      map_.assign(size_t(level.nodes), -1);
      int32_t kept = 0, count = 0, emitting = 0;
      for (int32_t n = 0; n < level.nodes; ++n)
        if (first ? n == node : before_map_[size_t(s.links[size_t(entering_link(s, int32_t(l), n))].source)] >= 0)
          map_[size_t(n)] = kept++;
      for (int32_t n = 0; n < level.nodes; ++n) {
        int32_t to = map_[size_t(n)];
        if (to < 0) continue;
        nodes[to] = {nodes[n].extra, -1};
        if (last) s.frontier[size_t(to)] = s.frontier[size_t(n)];
      }
      for (int32_t i = 0; i < level.emitting + level.epsilon && !first; ++i) {
        Link link = links[i];
        bool enters = i < level.emitting;
        link.source = (enters ? before_map_ : map_)[size_t(link.source)], link.target = map_[size_t(link.target)];
        if (link.source < 0 || link.target < 0) continue;
        if (link.excess == 0 && nodes[link.target].best < 0) nodes[link.target].best = count;
        links[count++] = link, emitting += enters;
      }
      level.nodes = kept, level.emitting = emitting, level.epsilon = count - emitting;
      if (last) s.frontier.resize(size_t(kept));
      before_map_.swap(map_);
    }
    s.levels.erase(s.levels.begin(), s.levels.begin() + from);
    s.base_frame += from;
    squeeze(s, 0);
  }

  // Prunes the history to what the paths to the ends need.
  void prune_ends(Session& s) {
    compute_finals(s);
    extras_.clear();
    for (float cost : final_) extras_.push_back(cost - final_best_ <= options_->lattice_beam ? cost - final_best_ : kInf);
    prune(s);
  }

  // A node of the history, and how a path of a lattice comes to it: the cost above the best path with the same words,
  // the graph's part of it, and the path's last step.
  struct Element {
    int32_t node;
    double cost, graph_cost;
    int32_t trace;
  };
  using Elements = std::map<int32_t, Element>;  // by node

  struct Trace {
    int64_t link;
    int32_t before;  // -1: the beginning
  };

  // The history's nodes in topological order, and its links by the nodes that they leave.
  struct Network {
    std::vector<int32_t> levels, nodes, sources, targets;  // of each node; of each link
    std::vector<float> extras;                             // of each node
    std::vector<int32_t> link_levels;
    std::vector<double> graph_costs;  // of each link
    std::vector<int64_t> first;       // of each node: its links in `leaving`
    std::vector<int64_t> leaving;
    std::vector<int32_t> lms;  // language model state of each node
    int32_t start;
  };

  Network make_network(const Session& s) const {
    Network n;
    size_t nodes = s.nodes.size(), links = s.links.size();
    std::vector<int32_t> numbers(nodes), depths(nodes, 0), order;
    n.sources.resize(links), n.targets.resize(links), n.link_levels.resize(links), n.graph_costs.resize(links);
    n.lms.assign(nodes, 0);
    for (size_t l = 0; l < s.levels.size(); ++l) {
      const Level& level = s.levels[l];
      order.clear();
      for (int32_t i = 0; i < level.nodes; ++i) order.push_back(int32_t(level.node) + i);
      for (int64_t i = level.link + level.emitting; i < level.link + level.emitting + level.epsilon; ++i) {
        int32_t& depth = depths[size_t(level.node + s.links[size_t(i)].target)];
        depth = std::max(depth, depths[size_t(level.node + s.links[size_t(i)].source)] + 1);
      }
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return depths[size_t(a)] < depths[size_t(b)]; });
      for (int32_t node : order) {
        numbers[size_t(node)] = int32_t(n.levels.size());
        n.levels.push_back(int32_t(l)), n.nodes.push_back(node - int32_t(level.node));
        n.extras.push_back(s.nodes[size_t(node)].extra);
      }
      for (int64_t i = level.link; i < level.link + level.emitting + level.epsilon; ++i) {
        const Link& link = s.links[size_t(i)];
        int64_t behind = i < level.link + level.emitting ? s.levels[l - 1].node : level.node;
        n.sources[size_t(i)] = numbers[size_t(behind + link.source)];
        n.targets[size_t(i)] = numbers[size_t(level.node + link.target)];
        n.link_levels[size_t(i)] = int32_t(l);
      }
    }
    n.start = numbers[size_t(first_node(s))];
    n.first.assign(nodes + 1, 0);
    for (int32_t source : n.sources) ++n.first[size_t(source) + 1];
    for (size_t i = 0; i < nodes; ++i) n.first[i + 1] += n.first[i];
    n.leaving.resize(links);
    std::vector<int64_t> place(n.first.begin(), n.first.end() - 1);
    for (size_t i = 0; i < links; ++i) n.leaving[size_t(place[size_t(n.sources[i])]++)] = int64_t(i);
    n.lms[size_t(n.start)] = s.first_lm;
    for (size_t node = 0; node < nodes; ++node)
      for (int64_t i = n.first[node]; i < n.first[node + 1]; ++i) {
        auto link = size_t(n.leaving[size_t(i)]);
        int32_t arc = s.links[link].arc, lm = n.lms[node];
        double cost = arc < 0 ? 0.0 : double(graph_->arcs[size_t(arc)].cost);
        if (arc >= 0 && graph_->arcs[size_t(arc)].word >= 0 && graph_->has_lm)
          cost -= double(graph_->lm.step(lm, graph_->arcs[size_t(arc)].word, lm));
        n.graph_costs[link] = cost, n.lms[size_t(n.targets[link])] = lm;
      }
    return n;
  }

  // Cost of the best path, with what was taken off the frontier's costs.
  double least_cost(const Session& s) const { return s.offset + double(final_best_); }

  // The history as a lattice, narrower than the lattice beam if it would be too large; the best path alone where more
  // paths are as good as the best one than a lattice may have.
  WordLattice make_lattice(const Session& s) {
    Network network = make_network(s);
    WordLattice lattice;
    for (double beam = double(options_->lattice_beam); !determinize(s, network, beam, lattice);
         beam = std::min(beam / 2, kMaxNarrowedBeam))
      if (beam <= kMinNarrowedBeam) return best_path_lattice(s, network);
    return lattice;
  }

  // A lattice with a single path, the best one.
  WordLattice best_path_lattice(const Session& s, const Network& network) {
    int32_t end = best_end();
    trace(s, end, path_);
    to_words(s, path_, words_);
    WordLattice lattice;
    double spent = 0;  // the graph's part since the last word
    for (const Step& step : path_) {
      int32_t arc = s.links[size_t(step.link)].arc;
      spent += network.graph_costs[size_t(step.link)];
      if (arc < 0 || graph_->arcs[size_t(arc)].word < 0) continue;
      auto state = int32_t(lattice.arcs.size());
      const Word& word = words_[size_t(state)];
      lattice.arcs.push_back({state, state + 1, word.word, 0.0, spent, word.start, word.end});
      spent = 0;
    }
    lattice.final_costs.assign(lattice.arcs.size() + 1, double(kInf));
    lattice.final_graph_costs.assign(lattice.arcs.size() + 1, 0.0);
    lattice.final_costs.back() = 0, lattice.final_graph_costs.back() = spent + final_graph_[size_t(end)];
    return lattice;
  }

  // Subset construction over words: a state is a set of nodes that paths with the same words reach, with what each
  // costs above the cheapest. Returns false for a lattice that would be too large, and for one in which no path ends.
  // Source: Mohri 1997, Finite-state transducers in language and speech processing.
  bool determinize(const Session& s, const Network& network, double beam, WordLattice& lattice) {
    lattice = {};
    traces_.clear();
    auto last = int32_t(s.levels.size()) - 1;
    struct State {
      std::vector<Element> elements;
      double forward;  // cost of the best path to it
      int32_t number;
    };
    std::vector<State> states;
    std::map<std::vector<int64_t>, int32_t> known;
    std::priority_queue<std::pair<int32_t, int32_t>, std::vector<std::pair<int32_t, int32_t>>, std::greater<>> open;
    auto find = [&](std::vector<Element>&& elements, double forward) {
      std::vector<int64_t> key;
      for (const Element& each : elements)
        key.push_back(each.node), key.push_back(int64_t(std::floor(each.cost * kCostSteps + 0.5)));
      auto [at, added] = known.try_emplace(std::move(key), int32_t(states.size()));
      if (added) {
        open.push({elements.front().node, at->second});
        states.push_back({std::move(elements), forward, -1});
      }
      State& state = states[size_t(at->second)];
      state.forward = std::min(state.forward, forward);
      return at->second;
    };
    find({{network.start, 0.0, 0.0, -1}}, 0.0);
    std::vector<Step> path;
    std::vector<Word> words;
    while (!open.empty()) {
      int32_t index = open.top().second;
      open.pop();
      states[size_t(index)].number = int32_t(lattice.final_costs.size());
      double forward = states[size_t(index)].forward, final_cost = kInf, final_graph_cost = 0;
      Elements reached;
      std::map<int32_t, Elements> followed;  // by word
      for (const Element& each : states[size_t(index)].elements) reached.emplace(each.node, each);
      for (auto at = reached.begin(); at != reached.end(); ++at) {
        const Element element = at->second;
        if (network.levels[size_t(element.node)] == last) {
          auto token = size_t(network.nodes[size_t(element.node)]);
          double cost = element.cost + double(final_[token] - final_best_);
          if (cost < final_cost) final_cost = cost, final_graph_cost = element.graph_cost + final_graph_[token];
        }
        for (int64_t i = network.first[size_t(element.node)]; i < network.first[size_t(element.node) + 1]; ++i) {
          int64_t place = network.leaving[size_t(i)];
          const Link& link = s.links[size_t(place)];
          int32_t target = network.targets[size_t(place)];
          double cost = element.cost + double(link.excess);
          if (forward + cost + double(network.extras[size_t(target)]) > beam) continue;
          int32_t word = link.arc < 0 ? kNoWord : graph_->arcs[size_t(link.arc)].word;
          Elements& to = word < 0 ? reached : followed[word];
          auto [found, added] = to.try_emplace(target, Element{target, cost, 0.0, 0});
          if (!added && !(cost < found->second.cost)) continue;
          found->second = {target, cost, element.graph_cost + network.graph_costs[size_t(place)], int32_t(traces_.size())};
          traces_.push_back({place, element.trace});
        }
      }
      if (forward + final_cost > beam) final_cost = kInf;
      lattice.final_costs.push_back(final_cost), lattice.final_graph_costs.push_back(final_graph_cost);
      for (auto& [word, to] : followed) {
        const Element *least = nullptr, *likeliest = nullptr;
        auto whole = [&](const Element& each) { return each.cost + double(network.extras[size_t(each.node)]); };
        for (const auto& [node, each] : to) {
          if (!least || each.cost < least->cost) least = &each;
          if (!likeliest || whole(each) < whole(*likeliest)) likeliest = &each;
        }
        // The graph's part is that of the first node: of equally cheap ones, rounding decides which is the cheapest.
        double spent = to.begin()->second.graph_cost;
        LatticeArc arc{states[size_t(index)].number, -1, word, least->cost, spent, 0, 0};
        trace_through(s, network, *likeliest, path);
        to_words(s, path, words);
        size_t count = 0;
        for (int32_t t = likeliest->trace; t >= 0; t = traces_[size_t(t)].before) {
          int32_t taken = s.links[size_t(traces_[size_t(t)].link)].arc;
          count += taken >= 0 && graph_->arcs[size_t(taken)].word >= 0;
        }
        arc.start = words[count - 1].start, arc.end = words[count - 1].end;
        std::vector<Element> elements;
        for (const auto& [node, each] : to)
          elements.push_back({node, each.cost - arc.cost, each.graph_cost - arc.graph_cost, each.trace});
        arc.target = find(std::move(elements), forward + arc.cost);
        lattice.arcs.push_back(arc);
      }
      if (lattice.arcs.size() > kMaxLatticeArcs || traces_.size() > kMaxLatticeTraces) return false;
    }
    for (LatticeArc& arc : lattice.arcs) arc.target = states[size_t(arc.target)].number;
    return std::any_of(lattice.final_costs.begin(), lattice.final_costs.end(), [](double cost) { return cost < kInf; });
  }

  // The best path that comes to an element as its trace says.
  void trace_through(const Session& s, const Network& network, const Element& element, std::vector<Step>& path) const {
    path.clear();
    auto step = [&](int64_t link) { path.push_back({network.link_levels[size_t(link)], link}); };
    for (int32_t t = element.trace; t >= 0; t = traces_[size_t(t)].before) step(traces_[size_t(t)].link);
    std::reverse(path.begin(), path.end());
    auto last = int32_t(s.levels.size()) - 1;
    for (int32_t node = element.node;;) {
      float least = kInf;
      int64_t next = -1;
      for (int64_t i = network.first[size_t(node)]; i < network.first[size_t(node) + 1]; ++i) {
        int64_t link = network.leaving[size_t(i)];
        float cost = s.links[size_t(link)].excess + network.extras[size_t(network.targets[size_t(link)])];
        if (cost < least) least = cost, next = link;
      }
      if (network.levels[size_t(node)] == last && final_[size_t(network.nodes[size_t(node)])] - final_best_ <= least)
        return;
      if (next < 0) return;
      step(next);
      node = network.targets[size_t(next)];
    }
  }

  // Cost above the best path of words; where the lattice lacks them, more than that of any path that it has.
  double cost_of(const WordLattice& lattice, const std::vector<Word>& words) const {
    double cost = 0;
    int32_t state = 0;
    for (const Word& word : words) {
      auto arc = std::find_if(lattice.arcs.begin(), lattice.arcs.end(), [&](const LatticeArc& each) {
        return each.source == state && each.word == word.word;
      });
      if (arc == lattice.arcs.end()) return double(options_->lattice_beam);
      cost += arc->cost, state = arc->target;
    }
    cost += lattice.final_costs[size_t(state)];
    return std::min(cost, double(options_->lattice_beam));
  }

  // Costs of ending in each token; where none may end, as if each might.
  void compute_finals(const Session& s) {
    final_best_ = kInf;
    for (bool may_end : {true, false}) {
      final_.clear(), final_graph_.clear();
      for (const Token& token : s.frontier) {
        float cost = may_end ? graph_->final_costs[size_t(token.state)] : 0.0f;
        if (may_end && graph_->has_lm) cost -= graph_->lm.model().final_logprobs[token.lm];
        final_.push_back(token.cost + cost), final_graph_.push_back(double(cost));
        final_best_ = std::min(final_best_, final_.back());
      }
      if (final_best_ < kInf) return;
    }
  }

  // The token in which the best path ends.
  int32_t best_end() const { return int32_t(std::min_element(final_.begin(), final_.end()) - final_.begin()); }

  // Posterior probabilities of the links that output words, by the forward-backward algorithm over the lattice. The
  // sums of each level are scaled on their own, since only ratios within a level are used. Paths end in any token.
  void compute_posteriors(const Session& s) {
    forward_.assign(s.nodes.size(), 0.0), backward_.assign(s.nodes.size(), 0.0), entry_.assign(s.nodes.size(), 0.0);
    weights_.resize(s.links.size());
    for (size_t i = 0; i < s.links.size(); ++i)
      weights_[i] = s.links[i].excess == 0 ? 1.0 : std::exp(-double(s.links[i].excess));
    auto last = int64_t(s.levels.size()) - 1;
    for (int64_t l = 0; l <= last; ++l) {
      const Level& level = s.levels[size_t(l)];
      double *at = forward_.data() + level.node, *entry = entry_.data() + level.node;
      int64_t within = level.link + level.emitting;
      if (l == 0) entry[first_node(s)] = 1.0;
      for (int64_t i = level.link; i < within; ++i)
        entry[s.links[size_t(i)].target] += before(s, l, forward_)[s.links[size_t(i)].source] * weights_[size_t(i)];
      std::copy_n(entry, level.nodes, at);
      for (int64_t i = within; i < within + level.epsilon; ++i)
        at[s.links[size_t(i)].target] += at[s.links[size_t(i)].source] * weights_[size_t(i)];
      double most = largest(at, level.nodes);
      for (int32_t n = 0; n < level.nodes; ++n) at[n] /= most, entry[n] /= most;
    }
    float best = kInf;
    for (const Token& token : s.frontier) best = std::min(best, token.cost);
    for (size_t n = 0; n < s.frontier.size(); ++n)
      backward_[size_t(s.levels[size_t(last)].node) + n] =
          std::exp(-double(s.frontier[n].cost - best));
    word_links_.clear();
    for (int64_t l = last; l >= 0; --l) {
      const Level& level = s.levels[size_t(l)];
      double *at = backward_.data() + level.node, *from = l ? backward_.data() + s.levels[size_t(l) - 1].node : nullptr;
      int64_t within = level.link + level.emitting;
      for (int64_t i = within + level.epsilon; i-- > within;)
        at[s.links[size_t(i)].source] += at[s.links[size_t(i)].target] * weights_[size_t(i)];
      double most = largest(at, level.nodes), total = 0, entering = 0;
      for (int32_t n = 0; n < level.nodes; ++n) at[n] /= most, total += entry_[size_t(level.node + n)] * at[n];
      for (int64_t i = level.link; i < within; ++i) {
        const Link& link = s.links[size_t(i)];
        double weight = weights_[size_t(i)] * at[link.target];
        from[link.source] += weight;
        entering += before(s, l, forward_)[link.source] * weight;
      }
      for (int64_t i = within + level.epsilon; i-- > level.link;) {
        const Link& link = s.links[size_t(i)];
        int32_t word = link.arc < 0 ? -1 : graph_->arcs[size_t(link.arc)].word;
        if (word < 0) continue;
        double source = i < within ? before(s, l, forward_)[link.source] : forward_[size_t(level.node + link.source)];
        double share = source * weights_[size_t(i)] * at[link.target] / (i < within ? entering : total);
        word_links_.push_back({int32_t(l), word, share});
      }
    }
    std::reverse(word_links_.begin(), word_links_.end());
  }

  // Sums of the level before l.
  static const double* before(const Session& s, int64_t l, const std::vector<double>& sums) {
    return sums.data() + (l ? s.levels[size_t(l) - 1].node : 0);
  }

  static double largest(const double* sums, int32_t count) {
    double most = 0;
    for (int32_t n = 0; n < count; ++n) most = std::max(most, sums[n]);
    return most > 0 ? most : 1;
  }

  // The node with which the history begins.
  static int32_t first_node(const Session& s) {
    int32_t n = 0;
    while (s.nodes[size_t(n)].best >= 0) ++n;
    return n;
  }

  // Probability of each word of a path: of all paths' links that output the same word nearer to this one's output than
  // to those of the path's words beside it. Source: Wessel et al. 2001, Confidence measures for large vocabulary
  // continuous speech recognition.
  void set_logprobs(const Session& s, const std::vector<Step>& path, std::vector<Word>& words) {
    outputs_.clear();
    for (const Step& step : path) {
      int32_t arc = s.links[size_t(step.link)].arc;
      if (arc >= 0 && graph_->arcs[size_t(arc)].word >= 0) outputs_.push_back(step.level);
    }
    for (size_t i = 0; i < words.size(); ++i) {
      int32_t low = i ? (outputs_[i - 1] + outputs_[i]) / 2 + 1 : 0;
      int32_t high = i + 1 < words.size() ? (outputs_[i] + outputs_[i + 1]) / 2 : int32_t(s.levels.size());
      low = std::min(low, outputs_[i]);
      auto link = std::lower_bound(word_links_.begin(), word_links_.end(), low,
                                   [](const WordLink& a, int32_t level) { return a.level < level; });
      double sum = 0;
      for (; link != word_links_.end() && link->level <= high; ++link)
        if (link->word == words[i].word) sum += link->posterior;
      words[i].logprob = std::log(std::clamp(sum, 1e-10, 1.0));
    }
  }

  // Paths from the end to the beginning, cheapest first: the rest of a path costs nothing at best, so the first that
  // arrives with some words is the best one that has them. Of equally dear ones, those nearest to the beginning are
  // followed first: so each that is begun arrives before others that may be as many as there are ties. The best path
  // is found at least.
  void find_nbest(const Session& s, int32_t most, std::vector<Hypothesis>& out) {
    struct Partial {
      int32_t level, node, suffix;
      int64_t link, after;  // the link by which it came to the node, and the partial path behind it; -1: at the end
    };
    using Entry = std::tuple<double, int32_t, int64_t>;  // cost above the best path's, level, and the partial path
    std::vector<Partial> partials;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
    std::unordered_map<uint64_t, int32_t> suffixes;  // of a suffix and the word before it
    std::unordered_set<uint64_t> expanded;           // of a node and a suffix
    const auto last = int32_t(s.levels.size()) - 1;
    auto push = [&](double cost, const Partial& partial) {
      queue.push({cost, partial.level, int64_t(partials.size())});
      partials.push_back(partial);
    };
    for (size_t n = 0; n < s.frontier.size(); ++n)
      if (final_[n] < kInf) push(double(final_[n] - final_best_), {last, int32_t(n), 0, -1, -1});
    int32_t beginning = first_node(s);
    for (int64_t steps = 0; !queue.empty() && int32_t(out.size()) < most && steps < kMaxSteps; ++steps) {
      auto [cost, position, index] = queue.top();
      queue.pop();
      const Partial partial = partials[size_t(index)];
      const Level& level = s.levels[size_t(position)];
      if (!expanded.insert(uint64_t(level.node + partial.node) << 32 | uint32_t(partial.suffix)).second) continue;
      if (!position && partial.node == beginning) {
        path_.clear();
        for (int64_t i = index; partials[size_t(i)].link >= 0; i = partials[size_t(i)].after)
          path_.push_back({partials[size_t(partials[size_t(i)].after)].level, partials[size_t(i)].link});
        Hypothesis& found = out.emplace_back(Hypothesis{least_cost(s) + cost, {}});
        to_words(s, path_, found.words);
        continue;
      }
      for (int64_t i = level.link; i < level.link + level.emitting + level.epsilon; ++i) {
        const Link& link = s.links[size_t(i)];
        if (link.target != partial.node) continue;
        int32_t word = link.arc < 0 ? -1 : graph_->arcs[size_t(link.arc)].word, suffix = partial.suffix;
        if (word >= 0)
          suffix = suffixes.try_emplace(uint64_t(suffix) << 32 | uint32_t(word), int32_t(suffixes.size()) + 1)
                       .first->second;
        push(cost + double(link.excess),
             {position - (i < level.link + level.emitting), link.source, suffix, i, index});
      }
    }
    if (!out.empty()) return;
    trace(s, best_end(), path_);
    to_words(s, path_, out.emplace_back(Hypothesis{s.offset + double(final_best_), {}}).words);
  }

  struct WordLink {
    int32_t level, word;
    double posterior;
  };

  const Graph* graph_ = nullptr;
  const Options* options_ = nullptr;
  std::vector<Candidate> candidates_;  // of the frame; the vector only grows
  size_t candidates_count_ = 0;
  std::vector<int32_t> words_ahead_;   // candidates that output a word whose cost is not looked up yet
  std::vector<Candidate> epsilon_;     // the same of epsilon arcs, whose sources are tokens
  std::vector<Link> kept_;
  TokenTable table_;
  std::vector<Token> tokens_;  // of the frame
  std::vector<Link> links_;    // of the frame's epsilon arcs; `excess` holds the cost of the path
  std::vector<std::vector<int32_t>> waiting_;  // tokens with epsilon arcs, by the depth of their states
  std::vector<float> negated_, costs_, extras_, before_, final_;
  std::vector<int32_t> targets_;  // tokens of the candidates; -1: none
  std::vector<int32_t> map_, before_map_, reached_, outputs_;
  std::vector<uint8_t> seen_;
  std::vector<Step> path_;
  std::vector<Word> words_;
  std::vector<double> forward_, backward_, entry_, weights_;
  std::vector<WordLink> word_links_;
  std::vector<double> final_graph_;  // the graph's part of the costs of ending
  std::vector<Trace> traces_;
  float final_best_ = kInf;
  float least_ = 0;  // cost of any column of the frame
};

}  // namespace asr_serve::wfst
