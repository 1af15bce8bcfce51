// CTC prefix beam search, frame by frame: Hannun et al. 2014, arXiv:1408.2873. What lies where in a session's row
// is told in ../ctc_search_reference.py, which does the same in Python, operation by operation.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "ngram.hpp"

namespace asr_serve {

constexpr double NONE = -std::numeric_limits<double>::infinity();
constexpr int64_t NO_PARENT = -2;

inline double add(double a, double b) {  // log(exp(a) + exp(b))
  double low = a < b ? a : b, high = a < b ? b : a;
  return low == NONE ? high : high + std::log1p(std::exp(low - high));
}

inline double clean(float x) { return std::isfinite(x) ? double(x) : NONE; }

struct Node {
  int64_t parent, token, frame;
  double peak, logprob;
};

struct Entry {
  int64_t node;
  double blank, token;
  int64_t spot = 0;   // of the hot words' graph
  double gain = 0.0;  // what hot words and the language model are worth so far
  int32_t context = 0;  // state of the language model
};

struct Item {
  int64_t token, frame;
  double logprob;
};

// Pointers into one session's row; null: `spots` without hot words, `contexts` without a language model, `gains`
// without either.
struct Row {
  int64_t *counts, *heads, *nodes;
  double *scores, *peaks;
  int64_t* spots = nullptr;
  double* gains = nullptr;
  int64_t* contexts = nullptr;
};

// N-gram model of a search, and what its log-probabilities and each token are worth.
struct Language {
  Ngram model;
  double weight, token_bonus;
};

// Hot words: decoding/biasing_graph.BiasingGraph, as decoding/biasing_list.py lays it out.
struct Graph {
  int64_t count = 0;
  const int64_t *firsts, *tokens, *nexts, *fails;
  const double *partial_bonuses, *word_bonuses;
  const uint8_t* opens;
  double boost;

  int64_t go(int64_t node, int64_t token) const {
    for (;;) {
      const int64_t *from = tokens + firsts[node], *to = tokens + firsts[node + 1];
      const int64_t* at = std::lower_bound(from, to, token);
      if (at != to && *at == token) return nexts[at - tokens];
      if (node == 0) return 0;
      node = fails[node];
    }
  }

  // The node after a token, and what that is worth.
  std::pair<int64_t, double> step(int64_t node, int64_t token) const {
    int64_t then = go(node, token);
    double gain = (word_bonuses[then] + partial_bonuses[then] - partial_bonuses[node]) * boost;
    return {then == 0 && opens[token] ? 1 : then, gain};
  }
};

struct Options {
  int64_t vocab, size, arena, blank, top;
  double min_logprob, max_gap;
};

// One session's search, taken out of its row. One to a thread, used again for the next row.
class Beam {
 public:
  std::vector<Entry> entries;

  bool load(const Row& row, const Options& options, Item* fixed, const Graph* graph = nullptr,
            const Language* language = nullptr) {
    graph_ = graph, language_ = language, options_ = options, fixed_ = fixed, fixed_count_ = 0;
    size_t width = size_t(options.size);
    totals_.resize(width), lasts_.resize(width), parents_.resize(width);
    nodes_.reserve(size_t(options.arena) + width), kept_.reserve(width + 1), tokens_.reserve(size_t(options.top) + 1);
    entries.reserve(width), next_.reserve(width);
    int64_t count = row.counts[0], used = row.counts[1];
    last_ = row.counts[2] - 1;
    if (count < 0 || count > options.size || used < 0 || used > options.arena) return false;
    if (last_ < -1 || last_ >= options.vocab) return false;
    nodes_.clear(), entries.clear();
    for (int64_t i = 0; i < used; ++i) {
      const int64_t* link = row.nodes + 3 * i;
      if (link[0] < -1 || link[0] >= i || link[1] < 0 || link[1] >= options.vocab) return false;
      nodes_.push_back({link[0], link[1], link[2], row.peaks[2 * i], row.peaks[2 * i + 1]});
    }
    for (int64_t i = 0; i < count; ++i) {
      if (row.heads[i] < -1 || row.heads[i] >= used) return false;
      entries.push_back({row.heads[i], row.scores[2 * i], row.scores[2 * i + 1]});
      if (row.gains) entries.back().gain = row.gains[i];
      if (graph) {
        if (row.spots[i] < 0 || row.spots[i] >= graph->count) return false;
        entries.back().spot = row.spots[i];
      }
      if (language) {
        if (row.contexts[i] < 0 || row.contexts[i] >= language->model.states) return false;
        entries.back().context = int32_t(row.contexts[i]);
      }
    }
    if (entries.empty()) entries.push_back({-1, 0.0, NONE, 1, 0.0, language ? language->model.start_state : 0});
    return true;
  }

  void save(const Row& row) const {
    row.counts[0] = int64_t(entries.size()), row.counts[1] = int64_t(nodes_.size()), row.counts[2] = last_ + 1;
    for (size_t i = 0; i < entries.size(); ++i) {
      row.heads[i] = entries[i].node;
      row.scores[2 * i] = entries[i].blank, row.scores[2 * i + 1] = entries[i].token;
      if (row.gains) row.gains[i] = entries[i].gain;
      if (graph_) row.spots[i] = entries[i].spot;
      if (language_) row.contexts[i] = entries[i].context;
    }
    for (size_t i = 0; i < nodes_.size(); ++i) {
      row.nodes[3 * i] = nodes_[i].parent, row.nodes[3 * i + 1] = nodes_[i].token;
      row.nodes[3 * i + 2] = nodes_[i].frame;
      row.peaks[2 * i] = nodes_[i].peak, row.peaks[2 * i + 1] = nodes_[i].logprob;
    }
  }

  int64_t fixed_count() const { return fixed_count_; }

  // What the best entry says after what is fixed, written backwards from `end`. A token's frame is before the
  // next one's.
  int64_t path(Item* end) const {
    Item* at = end;
    int64_t limit = std::numeric_limits<int64_t>::max();
    for (int64_t node = entries[0].node; node >= 0; node = nodes_[size_t(node)].parent) {
      const Node& it = nodes_[size_t(node)];
      limit = std::min(limit - 1, it.frame);
      *--at = {it.token, limit, it.logprob};
    }
    return end - at;
  }

  void hear(const float* logprobs, int64_t frame) {
    rank(logprobs);
    if (kept_.empty()) return;  // nothing that could have been said here: the frame says nothing
    double best = kept_[0].score;
    next_.clear();
    for (const Kept& k : kept_) {
      if (!(k.score >= best - options_.max_gap)) continue;
      int64_t node = entries[size_t(k.entry)].node;
      if (k.token >= 0) node = child(node, k.token, frame);
      double peak = k.nonblank + k.gain - best;
      if (node >= 0 && peak > nodes_[size_t(node)].peak) {
        Node& it = nodes_[size_t(node)];
        it.peak = peak, it.frame = frame, it.logprob = clean(logprobs[it.token]);
      }
      next_.push_back({node, k.blank, k.nonblank, k.spot, k.gain, k.context});
    }
    entries.swap(next_);
    settle();
  }

 private:
  struct Kept {
    double score;
    int64_t entry, token;  // token -1: the entry goes on as it is
    double blank, nonblank;
    int64_t spot;
    double gain;
    int32_t context;
  };
  struct Heard {
    float logprob;
    int64_t token;
  };

  // The likeliest tokens of a frame, best first; of equals the lower one.
  void choose(const float* logprobs) {
    constexpr int64_t BLOCK = 32;
    const int64_t vocab = options_.vocab, blank = options_.blank;
    const auto top = size_t(options_.top);
    tokens_.clear();
    // Rounded down: good for a first look, in which most blocks end.
    auto bound = float(options_.min_logprob);
    if (double(bound) > options_.min_logprob) bound = std::nextafter(bound, -std::numeric_limits<float>::infinity());
    for (int64_t from = 0; from < vocab; from += BLOCK) {
      int64_t to = std::min(vocab, from + BLOCK);
      int over = 0;
      for (int64_t t = from; t < to; ++t) over |= int(logprobs[t] >= bound);
      if (!over) continue;
      for (int64_t t = from; t < to; ++t) {
        float x = logprobs[t];
        if (!(x >= bound) || t == blank || !std::isfinite(x) || double(x) < options_.min_logprob) continue;
        if (tokens_.size() == top) {
          if (x <= tokens_.back().logprob) continue;
          tokens_.pop_back();
        }
        auto at = tokens_.end();
        while (at != tokens_.begin() && (at - 1)->logprob < x) --at;
        tokens_.insert(at, {x, t});
        if (tokens_.size() == top) bound = std::max(bound, tokens_.back().logprob);
      }
    }
  }

  // Among the kept unless there are enough better ones; of equals the first that comes is better.
  bool keep(const Kept& it) {
    if (!(it.score > NONE)) return false;
    if (int64_t(kept_.size()) == options_.size) {
      if (!(it.score > kept_.back().score)) return false;
      kept_.pop_back();
    }
    auto at = kept_.end();
    while (at != kept_.begin() && (at - 1)->score < it.score) --at;
    kept_.insert(at, it);
    return true;
  }

  void rank(const float* logprobs) {
    choose(logprobs);
    kept_.clear();
    auto count = int64_t(entries.size());
    for (int64_t i = 0; i < count; ++i) {
      const Entry& e = entries[size_t(i)];
      totals_[size_t(i)] = add(e.blank, e.token);
      lasts_[size_t(i)] = e.node >= 0 ? nodes_[size_t(e.node)].token : last_;
      int64_t above = e.node >= 0 ? nodes_[size_t(e.node)].parent : NO_PARENT;
      parents_[size_t(i)] = -1;
      for (int64_t j = 0; j < count; ++j)
        if (entries[size_t(j)].node == above) parents_[size_t(i)] = j;
    }
    double blank_logprob = clean(logprobs[options_.blank]);
    for (int64_t i = 0; i < count; ++i) {
      const Entry& e = entries[size_t(i)];
      int64_t last = lasts_[size_t(i)], parent = parents_[size_t(i)];
      double said = last >= 0 ? clean(logprobs[last]) : NONE;
      double blank = totals_[size_t(i)] + blank_logprob, nonblank = last >= 0 ? e.token + said : NONE;
      if (parent >= 0) {
        // A token said twice needs a blank between.
        bool twice = lasts_[size_t(parent)] == last;
        nonblank = add(nonblank, (twice ? entries[size_t(parent)].blank : totals_[size_t(parent)]) + said);
      }
      keep({add(blank, nonblank) + e.gain, i, -1, blank, nonblank, e.spot, e.gain, e.context});
    }
    for (int64_t i = 0; i < count; ++i) {
      const Entry& e = entries[size_t(i)];
      for (const Heard& heard : tokens_) {
        bool twice = heard.token == lasts_[size_t(i)];
        double said = (twice ? e.blank : totals_[size_t(i)]) + double(heard.logprob);
        double gain = e.gain;
        int64_t spot = e.spot;
        int32_t context = e.context;
        if (graph_) {
          auto [then, more] = graph_->step(spot, heard.token);
          spot = then, gain += more;
        }
        if (language_) {
          double logprob = language_->model.step<double>(e.context, int32_t(heard.token), context);
          gain = gain + language_->weight * logprob + language_->token_bonus;
        }
        bool fits = int64_t(kept_.size()) < options_.size || said + gain > kept_.back().score;
        if (!fits && !twice && !graph_ && !language_) break;  // nor will the less likely tokens
        if (fits && !is_there(i, heard.token)) keep({said + gain, i, heard.token, NONE, said, spot, gain, context});
      }
    }
  }

  // Whether entry i, one token further, is an entry too.
  bool is_there(int64_t i, int64_t token) const {
    for (size_t j = 0; j < entries.size(); ++j)
      if (parents_[j] == i && lasts_[j] == token) return true;
    return false;
  }

  int64_t child(int64_t parent, int64_t token, int64_t frame) {
    for (auto i = size_t(parent + 1); i < nodes_.size(); ++i)
      if (nodes_[i].parent == parent && nodes_[i].token == token) return int64_t(i);
    nodes_.push_back({parent, token, frame, NONE, NONE});
    return int64_t(nodes_.size()) - 1;
  }

  // Fix what all entries say, and drop nodes that none says, until the rest fits into the arena.
  void settle() {
    mark();
    for (;;) {
      while (live_count_ && follows_one()) fix();
      if (live_count_ <= options_.arena) break;
      force();
      mark();
    }
    moved_.resize(nodes_.size());
    size_t index = 0;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (!live_[i]) continue;
      Node node = nodes_[i];
      if (node.parent >= 0) node.parent = moved_[size_t(node.parent)];
      moved_[i] = int64_t(index), nodes_[index++] = node;
    }
    nodes_.resize(index);
    for (Entry& e : entries)
      if (e.node >= 0) e.node = moved_[size_t(e.node)];
  }

  void mark() {
    live_.assign(nodes_.size(), 0);
    live_count_ = 0;
    for (const Entry& e : entries)
      for (int64_t at = e.node; at >= 0 && !live_[size_t(at)]; at = nodes_[size_t(at)].parent)
        live_[size_t(at)] = 1, ++live_count_;
  }

  // Whether every entry goes on after what is fixed, and all with the same node: `first_`.
  bool follows_one() {
    for (const Entry& e : entries)
      if (e.node < 0) return false;
    first_ = 0;
    while (!live_[first_]) ++first_;  // parents come first, so this one follows what is fixed
    for (size_t i = first_ + 1; i < nodes_.size(); ++i)
      if (live_[i] && nodes_[i].parent == -1) return false;
    return true;
  }

  void fix() {
    // Later than none of what follows it, or a token fixed after it could have been said before it.
    latest_.resize(nodes_.size());
    for (size_t i = first_; i < nodes_.size(); ++i) latest_[i] = nodes_[i].frame;
    for (size_t i = nodes_.size() - 1; i > first_; --i) {
      if (!live_[i]) continue;
      auto parent = size_t(nodes_[i].parent);
      latest_[parent] = std::min(latest_[parent], latest_[i] - 1);
    }
    last_ = nodes_[first_].token;
    fixed_[fixed_count_++] = {last_, latest_[first_], nodes_[first_].logprob};
    live_[first_] = 0, --live_count_;
    for (Node& node : nodes_)
      if (node.parent == int64_t(first_)) node.parent = -1;
    for (Entry& e : entries)
      if (e.node == int64_t(first_)) e.node = -1;
  }

  // Drop the entries that do not begin as the best does; if all do and it has no more to say, the worst.
  void force() {
    int64_t begins = oldest(entries[0].node);
    if (begins < 0)
      entries.pop_back();
    else
      std::erase_if(entries, [&](const Entry& e) { return oldest(e.node) != begins; });
  }

  int64_t oldest(int64_t node) const {
    while (node >= 0 && nodes_[size_t(node)].parent >= 0) node = nodes_[size_t(node)].parent;
    return node;
  }

  const Graph* graph_ = nullptr;
  const Language* language_ = nullptr;
  Options options_{};
  Item* fixed_ = nullptr;
  int64_t fixed_count_ = 0, last_ = -1, live_count_ = 0;
  size_t first_ = 0;
  std::vector<Node> nodes_;
  std::vector<Entry> next_;
  std::vector<Kept> kept_;
  std::vector<Heard> tokens_;
  std::vector<double> totals_;
  std::vector<int64_t> lasts_, parents_, moved_, latest_;
  std::vector<char> live_;
};

}  // namespace asr_serve
