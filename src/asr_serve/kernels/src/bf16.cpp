// Compiled for AVX512-BF16 alone, called where the processor has it. A number is one sum over its inputs in their order,
// whatever rows are computed beside it.
#include "bf16.h"

#include "tiles.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "bf16_sums.h"

namespace asr_serve {
namespace ASR_SERVE_ISA {
namespace {

#define ASR_SERVE_UNROLL _Pragma("GCC unroll 8")

// Rows that a few outputs are computed of while the weights of the next ones are fetched: the processor's own prefetcher
// does not keep up with the memory.
constexpr int64_t FEW_ROWS = 8;
// Blocks of outputs of a piece of work for a few rows, and rows and blocks for many: as many sums as fill the registers.
constexpr int NARROW = 2, WIDE = 4, WIDE_ROWS = 6;
constexpr int64_t PIECES = 16;
constexpr int64_t BLOCK_PAIR = BF16_OUTPUTS * BF16_INPUTS;

template <int R, int V>
struct Sums {
  __m512 at[R][V];
};

// Sums of rows x, x + stride, ... over all inputs, for V blocks of outputs.
template <int R, int V, bool FETCH>
inline __attribute__((always_inline)) void multiply(const uint16_t* x, int64_t stride, const uint16_t* weight,
                                                    int64_t block_stride, int64_t next, int64_t pairs,
                                                    Sums<R, V>& sums) {
  ASR_SERVE_UNROLL for (int r = 0; r < R; ++r) ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums.at[r][v] =
      _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh w[V];
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) {
      const uint16_t* from = weight + v * block_stride + k * BLOCK_PAIR;
      w[v] = (__m512bh)_mm512_loadu_si512(from);
      if (FETCH) _mm_prefetch(reinterpret_cast<const char*>(from + next), _MM_HINT_T1);
    }
    ASR_SERVE_UNROLL for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + k * BF16_INPUTS, sizeof pair);
      const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
      ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) sums.at[r][v] = _mm512_dpbf16_ps(sums.at[r][v], w[v], a);
    }
  }
}

template <int R, int V, bool FETCH>
void tile(const Bf16Product& p, int64_t row, int64_t block) {
  const int64_t block_stride = p.inputs * BF16_OUTPUTS;
  Sums<R, V> sums;
  // Of the last blocks nothing comes after: the same again.
  const int64_t next = block + 2 * V <= p.blocks ? V * block_stride : 0;
  multiply<R, V, FETCH>(p.x + row * p.inputs, p.inputs, p.packed + block * block_stride, block_stride, next,
                        p.inputs / BF16_INPUTS, sums);
  ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) {
    if (!p.bias) break;
    const __m512 bias = _mm512_loadu_ps(p.bias + (block + v) * BF16_OUTPUTS);
    ASR_SERVE_UNROLL for (int r = 0; r < R; ++r) sums.at[r][v] = _mm512_add_ps(sums.at[r][v], bias);
  }
  if (p.activation == Activation::none) {
    ASR_SERVE_UNROLL for (int v = 0; v < V; ++v) ASR_SERVE_UNROLL for (int r = 0; r < R; ++r)
        save_sums(p, row + r, (block + v) * BF16_OUTPUTS, sums.at[r][v]);
    return;
  }
  if constexpr (V % 2 == 0) {
    ASR_SERVE_UNROLL for (int v = 0; v < V; v += 2) ASR_SERVE_UNROLL for (int r = 0; r < R; ++r) {
      save_gated(p, row + r, block + v, sums.at[r][v], sums.at[r][v + 1]);
    }
  }
}

template <int V, bool FETCH>
void tile_of(const Bf16Product& p, int64_t row, int64_t rows, int64_t block) {
  switch (rows) {
    case 8: return tile<8, V <= NARROW ? V : NARROW, FETCH>(p, row, block);
    case 7: return tile<7, V <= NARROW ? V : NARROW, FETCH>(p, row, block);
    case 6: return tile<6, V, FETCH>(p, row, block);
    case 5: return tile<5, V, FETCH>(p, row, block);
    case 4: return tile<4, V, FETCH>(p, row, block);
    case 3: return tile<3, V, FETCH>(p, row, block);
    case 2: return tile<2, V, FETCH>(p, row, block);
    case 1: return tile<1, V, FETCH>(p, row, block);
  }
}

// All rows for `count` blocks of outputs.
void panel(const Bf16Product& p, int64_t block, int64_t count) {
  if (p.rows <= 4 * FEW_ROWS) {
    for (int64_t end = block + count; block < end; block += NARROW)
      for (int64_t row = 0; row < p.rows; row += FEW_ROWS) {
        const int64_t rows = std::min(FEW_ROWS, p.rows - row);
        if (end - block < NARROW)
          tile_of<1, false>(p, row, rows, block);
        else if (row == 0)
          tile_of<NARROW, true>(p, row, rows, block);
        else
          tile_of<NARROW, false>(p, row, rows, block);
      }
    return;
  }
  for (int64_t row = 0; row < p.rows; row += WIDE_ROWS) {
    const int64_t rows = std::min<int64_t>(WIDE_ROWS, p.rows - row);
    int64_t at = block;
    for (; at + WIDE <= block + count; at += WIDE) tile_of<WIDE, false>(p, row, rows, at);
    for (; at + NARROW <= block + count; at += NARROW) tile_of<NARROW, false>(p, row, rows, at);
    for (; at < block + count; ++at) tile_of<1, false>(p, row, rows, at);
  }
}

void product(const Bf16Product& p, ParallelFor parallel) {
  // What a thread fetches ahead it should use itself: a few rows come in long pieces.
  const int64_t size = p.rows <= 4 * FEW_ROWS ? std::max<int64_t>(WIDE, p.blocks / PIECES / WIDE * WIDE) : WIDE;
  auto one = [&](int64_t item) { panel(p, item * size, std::min(size, p.blocks - item * size)); };
  run((p.blocks + size - 1) / size, parallel, one);
}

}  // namespace
}  // namespace ASR_SERVE_ISA

MultiplyBf16 find_bf16(int64_t inputs) {
  __builtin_cpu_init();
  if (MultiplyBf16 tiles = find_tiles_of_rows(inputs)) return tiles;
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
             ? ASR_SERVE_ISA::product
             : nullptr;
}

}  // namespace asr_serve
#else
namespace asr_serve {
MultiplyBf16 find_bf16(int64_t) { return nullptr; }
}  // namespace asr_serve
#endif
