// How the attention of clips is cut into pieces of work. For files that are compiled once per instruction set.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace asr_serve::ASR_SERVE_ISA {
namespace {

inline int64_t round_up(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

struct alignas(64) Line {
  uint8_t bytes[64];
};

// Memory of a thread for one piece. It outlives the call: fresh pages cost more than what is written there.
template <typename T>
T* scratch(std::vector<Line>& lines, int64_t numbers) {
  const size_t wanted = (size_t(numbers) * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
  if (lines.size() < wanted) lines.resize(wanted);
  return reinterpret_cast<T*>(lines.data());
}

// One head of `queries` queries of one clip, from its query `first`.
struct Piece {
  int64_t offset, frames, first, queries, head;
};

// `rows`: queries that are computed together; most: queries of a piece, a multiple of rows. Long clips are shared out.
template <typename T>
std::vector<Piece> pieces_of(const ClipAttention<T>& call, int64_t rows, int64_t most) {
  std::vector<Piece> pieces;
  for (int64_t clip = 0, offset = 0; clip < call.clips; offset += call.frames[clip++]) {
    const int64_t frames = call.frames[clip], parts = (frames + most - 1) / most;
    const int64_t size = parts ? round_up((frames + parts - 1) / parts, rows) : 0;
    for (int64_t first = 0; first < frames; first += size)
      for (int64_t head = 0; head < call.heads; ++head)
        pieces.push_back({offset, frames, first, std::min(size, frames - first), head});
  }
  // The longest first, so that no thread is left alone with one at the end.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.queries * a.frames > b.queries * b.frames;
  });
  return pieces;
}

}  // namespace
}  // namespace asr_serve::ASR_SERVE_ISA
