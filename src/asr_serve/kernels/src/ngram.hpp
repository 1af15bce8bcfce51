// Queries of a back-off n-gram model that lies in the arrays of models/ngram.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

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

}  // namespace asr_serve
