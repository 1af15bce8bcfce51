// Queries of a back-off n-gram model that lies in the arrays of models/ngram.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace asr_serve {

struct Ngram {
  const int64_t* arc_offsets;
  const int32_t* arc_words;
  const float* arc_logprobs;
  const int32_t* arc_states;
  const int32_t* backoff_states;
  const float* backoff_logprobs;
  const float* final_logprobs;
  int32_t states;
  int32_t start_state;

  // Log-probability of `word` in `state`, added up in `Real`; `next` becomes the state after it.
  template <typename Real = float>
  Real step(int32_t state, int32_t word, int32_t& next) const {
    Real logprob = 0;
    while (state >= 0) {
      const int32_t *first = arc_words + arc_offsets[state], *end = arc_words + arc_offsets[state + 1], *arc;
      if (state == 0 && word >= 0 && word < end - first && first[word] == word) {
        arc = first + word;  // a vocabulary without gaps needs no search
      } else {
        arc = std::lower_bound(first, end, word);
      }
      if (arc != end && *arc == word) {
        int64_t index = arc - arc_words;
        next = arc_states[index];
        return logprob + arc_logprobs[index];
      }
      logprob += backoff_logprobs[state];
      state = backoff_states[state];
    }
    next = 0;
    return -std::numeric_limits<Real>::infinity();
  }
};

// An n-gram model laid out for many queries: what a query of a context reads lies together, and a filter of each
// context's words tells of most words that the context lacks without a search.
class IndexedNgram {
 public:
  void build(const Ngram& model) {
    model_ = model;
    contexts_.clear(), filters_.clear(), unigrams_.clear();
    for (int64_t arc = model.arc_offsets[0]; arc < model.arc_offsets[1]; ++arc) {
      auto word = size_t(model.arc_words[arc]);
      if (word >= unigrams_.size()) unigrams_.resize(word + 1, {-std::numeric_limits<float>::infinity(), 0});
      unigrams_[word] = {model.arc_logprobs[arc], model.arc_states[arc]};
    }
    contexts_.push_back({});
    for (int32_t state = 1; state < model.states; ++state) {
      int64_t first = model.arc_offsets[state], end = model.arc_offsets[state + 1];
      Context context{first, int32_t(end - first), 0, 0, model.backoff_states[state], model.backoff_logprobs[state]};
      while ((int64_t(4) << context.shift) < end - first) ++context.shift;  // 16 bits for each word, or more
      context.filter = int32_t(filters_.size());
      filters_.resize(filters_.size() + (size_t(1) << context.shift));
      for (int64_t arc = first; arc < end; ++arc) {
        uint64_t hash = mix(model.arc_words[arc]);
        filters_[filter_at(context, hash)] |= bits(hash);
      }
      contexts_.push_back(context);
    }
  }

  const Ngram& model() const { return model_; }

  // As Ngram::step, for words from 0 on.
  float step(int32_t state, int32_t word, int32_t& next) const {
    uint64_t hash = mix(word), wanted = bits(hash);
    float logprob = 0.0f;
    while (state > 0) {
      const Context& context = contexts_[size_t(state)];
      if ((filters_[filter_at(context, hash)] & wanted) == wanted) {
        const int32_t *first = model_.arc_words + context.first, *end = first + context.words;
        const int32_t* arc = std::lower_bound(first, end, word);
        if (arc != end && *arc == word) {
          int64_t index = arc - model_.arc_words;
          next = model_.arc_states[index];
          return logprob + model_.arc_logprobs[index];
        }
      }
      logprob += context.backoff_logprob;
      state = context.backoff_state;
    }
    if (size_t(word) >= unigrams_.size()) return next = 0, -std::numeric_limits<float>::infinity();
    next = unigrams_[size_t(word)].state;
    return logprob + unigrams_[size_t(word)].logprob;
  }

 private:
  struct Context {
    int64_t first;  // arc
    int32_t words;  // arcs
    int32_t filter, shift;  // its first part, and the binary logarithm of the number of parts
    int32_t backoff_state;
    float backoff_logprob;
  };
  struct Unigram {
    float logprob;
    int32_t state;
  };

  static uint64_t mix(int32_t word) {
    uint64_t key = (uint64_t(uint32_t(word)) + 1) * 0x9E3779B97F4A7C15ull;
    return (key ^ key >> 29) * 0xBF58476D1CE4E5B9ull;
  }
  static uint64_t bits(uint64_t hash) { return uint64_t(1) << (hash >> 58) | uint64_t(1) << (hash >> 52 & 63); }
  static size_t filter_at(const Context& c, uint64_t hash) {
    return size_t(c.filter) + (size_t(hash >> 20) & ((size_t(1) << c.shift) - 1));
  }

  Ngram model_{};
  std::vector<Context> contexts_;
  std::vector<uint64_t> filters_;
  std::vector<Unigram> unigrams_;  // by word
};

}  // namespace asr_serve
