// Products of bf16 rows by the processor's own instructions: matrix tiles (Intel AMX) or AVX512-BF16. Both read weights
// that are packed for tiles.
#pragma once
#include <cstddef>

#include "bf16.h"
#include "kernels.h"

namespace asr_serve {

struct TileProduct {
  int64_t rows, outputs;
  size_t parts;  // a row's inputs lie in so many places
  const int64_t* widths;
  const void* const* const* starts;  // (parts, rows)
  const void* weight;  // bf16 (outputs / 16, inputs / 2, 16, 2), padded with zeros to multiples of 32
  const float* bias;   // padded likewise
  bool relu;
  uint16_t* out;  // bf16 (rows, outputs)
};

using TileMultiply = void (*)(const TileProduct& product, ParallelFor parallel);

// nullptr where the processor or the system has none.
TileMultiply find_tiles();
// Products of rows that lie together; nullptr without matrix tiles, and for inputs that do not fill them.
MultiplyBf16 find_tiles_of_rows(int64_t inputs);

}  // namespace asr_serve
