// Products of bf16 rows by the processor's own instructions for pairs of bf16 numbers: matrix tiles (Intel AMX) where it
// has them and the system lets us, else the products of bf16.cpp. Compiled for those alone; which is used does not
// depend on the number of rows.
#include "tiles.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bf16_sums.h"

namespace asr_serve {
namespace ASR_SERVE_ISA {
namespace {

constexpr int64_t COLUMNS = 32, DEPTH = 32;  // to whose multiples weights are padded

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

struct alignas(64) Line {
  uint8_t bytes[64];
};

// Rounds `rows` rows of sums, 16 columns of each, and stores those that there are.
void store(const TileProduct& product, int64_t row, int64_t rows, const float* sums, int64_t column) {
  const int64_t count = std::min<int64_t>(16, product.outputs - column);
  if (count <= 0) return;
  const __mmask16 mask = __mmask16((1u << count) - 1);
  const __m512 bias = _mm512_loadu_ps(product.bias + column);
  const __m512 low = product.relu ? _mm512_setzero_ps() : _mm512_set1_ps(-INFINITY);
  for (int64_t r = 0; r < rows; ++r) {
    // The second operand where one is NaN.
    __m512 sum = _mm512_max_ps(low, _mm512_add_ps(_mm512_load_ps(sums + r * COLUMNS), bias));
    _mm256_mask_storeu_epi16(product.out + (row + r) * product.outputs + column, mask,
                             (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

// Two by two tiles of 16 rows of 64 bytes.
struct Tiles {
  static constexpr int64_t ROWS = 32;

  static void multiply_rows(const TileProduct& product, int64_t row, const uint16_t* x, int64_t depth) {
    Config config;
    for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.bytes[i] = 64;
    _tile_loadconfig(&config);
    for (int64_t column = 0; column < product.outputs; column += COLUMNS) multiply(product, row, x, depth, column);
    _tile_release();
  }

  static void multiply(const TileProduct& product, int64_t row, const uint16_t* x, int64_t depth, int64_t column) {
    const int64_t block = depth * 16;  // numbers of 16 outputs
    const uint16_t* weight = reinterpret_cast<const uint16_t*>(product.weight) + column / 16 * block;
    const int64_t rows = std::min(ROWS, product.rows - row);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += DEPTH) {
      _tile_loadd(4, x + k, depth * 2);
      _tile_loadd(6, weight + k * 16, 64);
      _tile_loadd(7, weight + block + k * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (rows > 16) {
        _tile_loadd(5, x + 16 * depth + k, depth * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    alignas(64) float sums[ROWS * COLUMNS];
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, sums + 16, COLUMNS * 4);
    if (rows > 16) {
      _tile_stored(2, sums + 16 * COLUMNS, COLUMNS * 4);
      _tile_stored(3, sums + 16 * COLUMNS + 16, COLUMNS * 4);
    }
    store(product, row, rows, sums, column);
    store(product, row, rows, sums + 16, column + 16);
  }
};

// The products of bf16.cpp, over rows that lie together.
struct Dots {
  static constexpr int64_t ROWS = 48;

  static void multiply_rows(const TileProduct& product, int64_t row, const uint16_t* x, int64_t depth) {
    static const MultiplyBf16 multiply_bf16 = find_bf16(BF16_INPUTS);
    const int64_t rows = std::min(ROWS, product.rows - row), blocks = (product.outputs + COLUMNS - 1) / COLUMNS * 2;
    uint16_t* out = product.out + row * product.outputs;
    multiply_bf16({.x = x, .packed = static_cast<const uint16_t*>(product.weight), .bias = product.bias, .add = nullptr,
                   .out = out, .out_float = false, .activation = Activation::none, .rows = rows, .inputs = depth,
                   .blocks = blocks, .outputs = product.outputs},
                  [](int64_t items, Body body, void* context) {
                    for (int64_t item = 0; item < items; ++item) body(context, item);
                  });
    if (!product.relu) return;
    constexpr uint16_t SIGN = 0x8000, INFINITE = 0x7f80;
    for (int64_t i = 0; i < rows * product.outputs; ++i)
      if (out[i] & SIGN && (out[i] & ~SIGN) <= INFINITE) out[i] = 0;  // a NaN stays
  }
};

template <typename Unit>
void multiply_all(const TileProduct& product, ParallelFor parallel) {
  constexpr int64_t ROWS = Unit::ROWS;
  const int64_t stripes = (product.rows + ROWS - 1) / ROWS;
  int64_t depth = 0;
  for (size_t i = 0; i < product.parts; ++i) depth += product.widths[i];
  depth = (depth + DEPTH - 1) / DEPTH * DEPTH;
  auto one = [&](int64_t stripe) {
    thread_local std::vector<Line> buffer;
    if (buffer.size() < size_t(ROWS * depth) / 32) buffer.resize(size_t(ROWS * depth) / 32);
    auto* x = reinterpret_cast<uint16_t*>(buffer.data());
    const int64_t row = stripe * ROWS, rows = std::min(ROWS, product.rows - row);
    for (int64_t r = 0; r < ROWS; ++r) {
      uint16_t* to = x + r * depth;
      int64_t filled = 0;
      for (size_t i = 0; r < rows && i < product.parts; filled += product.widths[i++])
        std::memcpy(to + filled, product.starts[i][row + r], size_t(product.widths[i]) * 2);
      std::memset(to + filled, 0, size_t(depth - filled) * 2);
    }
    Unit::multiply_rows(product, row, x, depth);
  };
  if (stripes > 1)
    return parallel(stripes, [](void* context, int64_t item) { (*static_cast<decltype(one)*>(context))(item); }, &one);
  one(0);
}

// --- rows that lie together --------------------------------------------------------------------------------------

// A number is one sum over its inputs, in an order that does not depend on the rows beside it: so a few rows take tiles
// too, which the memory feeds slower than the processor multiplies.
constexpr int64_t STRIPE = 32;  // rows of a product of two by two tiles
// Rows whose inputs stay in the second cache while weights pass by, and pieces of work of a few rows.
constexpr int64_t GROUP_BYTES = 512 << 10, PIECES = 32;

void configure(int64_t rows) {
  Config config;
  const int64_t first = std::min<int64_t>(rows, 16), second = rows - first;
  const int64_t of_tiles[] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; ++i) config.rows[i] = uint8_t(of_tiles[i]), config.bytes[i] = of_tiles[i] ? 64 : 0;
  _tile_loadconfig(&config);
}

inline void fetch(const uint16_t* weight) {
  for (int line = 0; line < 16; ++line) _mm_prefetch(reinterpret_cast<const char*>(weight + line * 32), _MM_HINT_T1);
}

// Sums of up to 32 rows for one or two blocks of outputs. `next`: distance of the weights that are read next, 0 for none.
template <bool PAIR, bool BOTH>
void sum_stripe(const Bf16Product& p, int64_t row, int64_t block, int64_t next, float* sums) {
  const int64_t block_stride = p.inputs * BF16_OUTPUTS, bytes = p.inputs * 2;
  const uint16_t *x = p.x + row * p.inputs, *weight = p.packed + block * block_stride;
  _tile_zero(0);
  if (PAIR) _tile_zero(1);
  if (BOTH) _tile_zero(2);
  if (PAIR && BOTH) _tile_zero(3);
  for (int64_t k = 0; k < p.inputs; k += DEPTH) {
    const uint16_t* from = weight + k * BF16_OUTPUTS;
    _tile_loadd(4, x + k, bytes);
    _tile_loadd(6, from, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (PAIR) _tile_loadd(7, from + block_stride, 64);
    if (PAIR) _tile_dpbf16ps(1, 4, 7);
    if (BOTH) _tile_loadd(5, x + 16 * p.inputs + k, bytes);
    if (BOTH) _tile_dpbf16ps(2, 5, 6);
    if (PAIR && BOTH) _tile_dpbf16ps(3, 5, 7);
    if (next) fetch(from + next);
    if (PAIR && next) fetch(from + block_stride + next);
  }
  _tile_stored(0, sums, COLUMNS * 4);
  if (PAIR) _tile_stored(1, sums + 16, COLUMNS * 4);
  if (BOTH) _tile_stored(2, sums + 16 * COLUMNS, COLUMNS * 4);
  if (PAIR && BOTH) _tile_stored(3, sums + 16 * COLUMNS + 16, COLUMNS * 4);
}

void save_stripe(const Bf16Product& p, int64_t row, int64_t rows, int64_t block, bool pair, const float* sums) {
  __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int v = 0; p.bias && v < 1 + pair; ++v) bias[v] = _mm512_loadu_ps(p.bias + (block + v) * BF16_OUTPUTS);
  for (int64_t r = 0; r < rows; ++r) {
    __m512 y[2];
    for (int v = 0; v < 1 + pair; ++v) y[v] = _mm512_add_ps(_mm512_load_ps(sums + r * COLUMNS + v * 16), bias[v]);
    if (p.activation != Activation::none) {
      save_gated(p, row + r, block, y[0], y[1]);
      continue;
    }
    for (int v = 0; v < 1 + pair; ++v) save_sums(p, row + r, (block + v) * BF16_OUTPUTS, y[v]);
  }
}

void multiply_stripe(const Bf16Product& p, int64_t row, int64_t rows, int64_t block, bool ahead) {
  alignas(64) float sums[STRIPE * COLUMNS];
  const bool pair = block + 1 < p.blocks;
  const int64_t next = ahead && block + 4 <= p.blocks ? 2 * p.inputs * BF16_OUTPUTS : 0;
  if (rows > 16)
    pair ? sum_stripe<true, true>(p, row, block, next, sums) : sum_stripe<false, true>(p, row, block, next, sums);
  else
    pair ? sum_stripe<true, false>(p, row, block, next, sums) : sum_stripe<false, false>(p, row, block, next, sums);
  save_stripe(p, row, rows, block, pair, sums);
}

void multiply_rows(const Bf16Product& p, ParallelFor parallel) {
  const int64_t pairs = (p.blocks + 1) / 2;
  const int64_t group = std::max(STRIPE, GROUP_BYTES / (p.inputs * 2) / STRIPE * STRIPE);
  const int64_t groups = (p.rows + group - 1) / group;
  const int64_t size = groups > 1 ? 4 : std::max<int64_t>(1, pairs / PIECES), pieces = (pairs + size - 1) / size;
  auto one = [&](int64_t item) {
    const int64_t first = item / pieces * group, end = std::min(p.rows, first + group);
    const int64_t from = item % pieces * size, to = std::min(pairs, from + size);
    int64_t configured = 0;
    for (int64_t pair = from; pair < to; ++pair)
      for (int64_t row = first; row < end; row += STRIPE) {
        const int64_t rows = std::min(STRIPE, end - row);
        if (rows != configured) configure(configured = rows);
        multiply_stripe(p, row, rows, 2 * pair, row == first);
      }
    _tile_release();
  };
  run(groups * pieces, parallel, one);
}

bool may_use_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-tile") &&
         !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

// Whether the processor has the products of bf16.cpp; tiles are for those that have both.
bool has_dots() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace
}  // namespace ASR_SERVE_ISA

TileMultiply find_tiles() {
  using namespace ASR_SERVE_ISA;
  if (!has_dots()) return nullptr;
  return may_use_tiles() ? multiply_all<Tiles> : multiply_all<Dots>;
}

MultiplyBf16 find_tiles_of_rows(int64_t inputs) {
  using namespace ASR_SERVE_ISA;
  return inputs % DEPTH == 0 && has_dots() && may_use_tiles() ? multiply_rows : nullptr;
}

}  // namespace asr_serve
#else
namespace asr_serve {
TileMultiply find_tiles() { return nullptr; }
MultiplyBf16 find_tiles_of_rows(int64_t) { return nullptr; }
}  // namespace asr_serve
#endif
