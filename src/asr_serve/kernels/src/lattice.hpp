// Word lattices and what is computed from them: the word sequence of minimum Bayes risk and the confidences of words.
//
// kernels/lattice_reference.py does the same in Python, with the same results to the last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace asr_serve::wfst {

struct Word {
  int32_t word, start, end;  // frames
  double logprob;
};

struct LatticeArc {
  int32_t source, target, word;
  double cost, graph_cost;  // in all, and the part of the decoding graph and its language model
  int32_t start, end;       // frames of the word on the best path through the arc
};

// Paths of words: acyclic, its states in topological order from 0 on, its arcs ordered by their sources. No two arcs of
// a state have the same word, so each word sequence has one path, with the costs of its best alignment.
struct WordLattice {
  std::vector<LatticeArc> arcs;
  std::vector<double> final_costs, final_graph_costs;  // of each state; infinite where no path ends
};

constexpr int32_t kNoWord = -1;
constexpr int kMaxRiskIterations = 100;
constexpr double kDeletionDelta = 1e-5;  // added to the cost of a deletion, so that alignments prefer substitutions

inline double log_add(double a, double b) {
  if (a < b) std::swap(a, b);
  return b == -std::numeric_limits<double>::infinity() ? a : a + std::log(1.0 + std::exp(b - a));
}

// Expected edit distance between a word sequence and the paths of a lattice, and the sequence for which it is least.
// Source: Xu, Povey, Mangu and Zhu 2011, Minimum Bayes Risk decoding and system combination based on a recursion for
// edit distance, figures 4 to 6; the times of words are those of its appendix C.
class BayesRisk {
 public:
  // `graph_scale`: factor of the graph's costs in the probabilities of paths.
  BayesRisk(const WordLattice& lattice, double graph_scale) : states_(int32_t(lattice.final_costs.size())) {
    auto scaled = [&](double cost, double graph) { return -(cost - (1.0 - graph_scale) * graph); };
    std::vector<double> logprobs;
    for (const LatticeArc& arc : lattice.arcs) {
      arcs_.push_back({arc.source, arc.target, arc.word, double(arc.start), double(arc.end), 0.0});
      logprobs.push_back(scaled(arc.cost, arc.graph_cost));
    }
    for (int32_t state = 0; state < states_; ++state) {
      if (!(lattice.final_costs[size_t(state)] < std::numeric_limits<double>::infinity())) continue;
      arcs_.push_back({state, states_, kNoWord, 0.0, 0.0, 0.0});
      logprobs.push_back(scaled(lattice.final_costs[size_t(state)], lattice.final_graph_costs[size_t(state)]));
    }
    std::vector<size_t> order(arcs_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return arcs_[a].target < arcs_[b].target; });
    std::vector<Arc> sorted;
    std::vector<double> forward(size_t(states_) + 1, -std::numeric_limits<double>::infinity()), sorted_logprobs;
    forward[0] = 0.0;
    for (size_t i : order) {
      sorted.push_back(arcs_[i]), sorted_logprobs.push_back(logprobs[i]);
    }
    arcs_.swap(sorted);
    for (size_t i = 0; i < arcs_.size(); ++i) {
      double& to = forward[size_t(arcs_[i].target)];
      to = log_add(to, forward[size_t(arcs_[i].source)] + sorted_logprobs[i]);
    }
    for (size_t i = 0; i < arcs_.size(); ++i)
      arcs_[i].share = std::exp(forward[size_t(arcs_[i].source)] + sorted_logprobs[i] - forward[size_t(arcs_[i].target)]);
  }

  // Expected edit distance of words; their confidences are then in `bins`.
  double evaluate(const std::vector<int32_t>& words) {
    reference_.assign(2 * words.size() + 1, kNoWord);
    for (size_t i = 0; i < words.size(); ++i) reference_[2 * i + 1] = words[i];
    return accumulate();
  }

  // Natural-log probabilities of words at their places in the confusion network that is aligned with them.
  std::vector<double> confidences(const std::vector<int32_t>& words) {
    evaluate(words);
    std::vector<double> found;
    for (size_t i = 0; i < words.size(); ++i) {
      double weight = 0;
      for (const Entry& entry : bins_[2 * i + 1])
        if (entry.word == words[i]) weight = entry.weight;
      found.push_back(log_of(weight));
    }
    return found;
  }

  // The words whose expected edit distance is least, from `words` on as far as steps downwards lead.
  std::vector<Word> decode(std::vector<int32_t> words) {
    for (int iteration = 0;; ++iteration) {
      evaluate(words);
      std::vector<Word> found;
      std::vector<int32_t> better;
      for (const std::vector<Entry>& bin : bins_) {
        const Entry* best = nullptr;
        for (const Entry& entry : bin)
          if (!best || entry.weight > best->weight || (entry.weight == best->weight && entry.word > best->word))
            best = &entry;
        if (!best || best->word == kNoWord) continue;
        better.push_back(best->word);
        found.push_back({best->word, int32_t(std::floor(best->start / best->weight + 0.5)),
                         int32_t(std::floor(best->end / best->weight + 0.5)), log_of(best->weight)});
      }
      if (better == words || iteration == kMaxRiskIterations) {
        separate(found);
        return found;
      }
      words.swap(better);
    }
  }

 private:
  struct Arc {
    int32_t source, target, word;
    double start, end, share;  // share: of the paths to its target, those that end with it
  };
  struct Entry {
    int32_t word;
    double weight, start, end;  // of all alignments; times are weighted sums
  };

  static double log_of(double weight) { return std::log(std::clamp(weight, 1e-10, 1.0)); }

  // Mean times may overlap: words next to each other then share the frames by halves.
  static void separate(std::vector<Word>& words) {
    for (size_t i = 0; i < words.size(); ++i) {
      if (i && words[i].start < words[i - 1].end) {
        int32_t low = std::min(words[i - 1].start, words[i].start), high = std::max(words[i - 1].end, words[i].end);
        words[i - 1].start = std::max(low, i > 1 ? words[i - 2].end : low);
        words[i - 1].end = words[i].start = std::max(words[i - 1].start + 1, low + (high - low) / 2);
        words[i].end = std::max(high, words[i].start + 1);
      }
      words[i].end = std::max(words[i].end, words[i].start + 1);
    }
  }

  void add(size_t bin, int32_t word, double weight, double start, double end) {
    for (Entry& entry : bins_[bin])
      if (entry.word == word) {
        entry.weight += weight, entry.start += weight * start, entry.end += weight * end;
        return;
      }
    bins_[bin].push_back({word, weight, weight * start, weight * end});
  }

  // The recursion along one arc; `from` are the distances at its source. `moves`: 1 substitution or match, 2 deletion
  // of the arc's word, 3 insertion of the reference's.
  void follow(const Arc& arc, const double* from) {
    size_t places = reference_.size();
    bool worded = arc.word != kNoWord;
    double dropped = worded ? 1.0 + kDeletionDelta : 0.0;
    along_[0] = from[0] + dropped;
    for (size_t q = 1; q <= places; ++q) {
      int32_t reference = reference_[q - 1];
      double match = from[q - 1] + (arc.word == reference ? 0.0 : 1.0), drop = from[q] + dropped,
             insert = along_[q - 1] + (reference == kNoWord ? 0.0 : 1.0);
      moves_[q] = match <= drop ? (match <= insert ? 1 : 3) : (drop <= insert ? 2 : 3);
      along_[q] = moves_[q] == 1 ? match : moves_[q] == 2 ? drop : insert;
    }
  }

  double accumulate() {
    size_t places = reference_.size(), row = places + 1;
    distances_.assign(size_t(states_ + 1) * row, 0.0), weights_.assign(size_t(states_ + 1) * row, 0.0);
    along_.assign(row, 0.0), moves_.assign(row, 0), bins_.assign(places, {});
    for (size_t q = 1; q <= places; ++q)
      distances_[q] = distances_[q - 1] + (reference_[q - 1] == kNoWord ? 0.0 : 1.0);
    for (const Arc& arc : arcs_) {
      follow(arc, distances_.data() + size_t(arc.source) * row);
      double* to = distances_.data() + size_t(arc.target) * row;
      for (size_t q = 0; q <= places; ++q) to[q] += arc.share * along_[q];
    }
    weights_[size_t(states_) * row + places] = 1.0;
    std::vector<double> weight(row);
    for (size_t i = arcs_.size(); i-- > 0;) {
      const Arc& arc = arcs_[i];
      follow(arc, distances_.data() + size_t(arc.source) * row);
      const double* to = weights_.data() + size_t(arc.target) * row;
      double* from = weights_.data() + size_t(arc.source) * row;
      for (size_t q = 0; q <= places; ++q) weight[q] = arc.share * to[q];
      for (size_t q = places; q >= 1; --q) {
        if (weight[q] == 0) continue;
        if (moves_[q] == 1) {
          from[q - 1] += weight[q];
          add(q - 1, arc.word, weight[q], arc.start, arc.end);
        } else if (moves_[q] == 2) {
          from[q] += weight[q];
        } else {
          weight[q - 1] += weight[q];
          add(q - 1, kNoWord, weight[q], 0.0, 0.0);
        }
      }
      from[0] += weight[0];
    }
    double rest = 0;
    for (size_t q = places; q >= 1; --q) {
      rest += weights_[q];
      if (rest > 0) add(q - 1, kNoWord, rest, 0.0, 0.0);
    }
    return distances_[size_t(states_) * row + places];
  }

  int32_t states_;  // and one more, in which all paths end
  std::vector<Arc> arcs_;  // by their targets
  std::vector<int32_t> reference_;  // words, with no word before, between and after them
  std::vector<double> distances_, weights_, along_;
  std::vector<uint8_t> moves_;
  std::vector<std::vector<Entry>> bins_;
};

}  // namespace asr_serve::wfst
