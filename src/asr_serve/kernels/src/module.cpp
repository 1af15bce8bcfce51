// The Python face of the kernels: checks shapes, lets go of the GIL, and borrows torch's threads.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "attention_module.h"
#include "bf16_module.h"
#include "decoder.h"
#include "decoder_layers_module.h"
#include "int8_module.h"
#include "int8_pages.h"
#include "kernels.h"
#include "layers_module.h"
#include "streaming.h"
#include "team.h"
#include "voice_activity_module.h"

namespace nb = nanobind;
using namespace asr_serve;

namespace {

// torch loads its OpenMP runtime into the process. A second pool beside it would fight it for the cores
// (both spin while they wait), so we enter torch's own through GOMP_parallel, and run alone without it.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel gomp_parallel = nullptr;
// Of the calling thread, as OpenMP's own counts are: the loop's may differ from an encoder's.
thread_local unsigned thread_count = 1;

struct Work {
  std::atomic<int64_t> next{0};
  int64_t items;
  Body body;
  void* context;
};

void drain(void* pointer) {
  auto* work = static_cast<Work*>(pointer);
  for (int64_t item; (item = work->next.fetch_add(1, std::memory_order_relaxed)) < work->items;)
    work->body(work->context, item);
}

void parallel_for(int64_t items, Body body, void* context) {
  Work work{.items = items, .body = body, .context = context};
  unsigned threads = unsigned(std::min<int64_t>(items, thread_count));
  if (threads > 1 && gomp_parallel)
    gomp_parallel(drain, &work, threads, 0);
  else
    drain(&work);
}

// As parallel_for, by the calling thread's team: for calls of a whole step.
void team_for(int64_t items, Body body, void* context) {
  Work work{.items = items, .body = body, .context = context};
  Team::mine().run(drain, &work, unsigned(std::min<int64_t>(items, thread_count)));
}

// Goes up when what callers may pass changes: see INTERFACES in ../__init__.py.
constexpr int INTERFACE = 1;

// Everything that was compiled for one instruction set.
struct Set {
  const char* name;
  const Kernels<float>* f32;
  const Kernels<bf16>* b16;
  const StreamingKernels<float>* streaming_f32;
  const StreamingKernels<bf16>* streaming_b16;
  Lstm lstm_f32;
  RunLayers run_layers;
  VadEncode vad_encode;
  const DecoderKernels<float>* decoder_f32;
  const DecoderKernels<bf16>* decoder_b16;
  const Int8PageKernels<float>* int8_pages_f32;
  const Int8PageKernels<bf16>* int8_pages_b16;
  AttendClips<float> attend_clips_f32;
};
#define ASR_SERVE_SET(isa) \
  Set { #isa, &isa::kernels_f32, &isa::kernels_bf16, &isa::streaming_f32, &isa::streaming_bf16, isa::lstm_f32, \
        isa::run_layers, isa::vad_encode, &isa::decoder_f32, &isa::decoder_bf16, &isa::int8_pages_f32, &isa::int8_pages_bf16, \
        isa::attend_clips_f32 }

Set chosen = ASR_SERVE_SET(generic);

void choose(const std::string& wanted) {
#ifdef ASR_SERVE_HAS_X86
  __builtin_cpu_init();
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512cd");
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("f16c");
  if ((wanted == "auto" || wanted == "avx512") && has_avx512) {
    chosen = ASR_SERVE_SET(avx512);
    return;
  }
  if ((wanted == "auto" || wanted == "avx2") && has_avx2) {
    chosen = ASR_SERVE_SET(avx2);
    return;
  }
#endif
  if (wanted != "auto" && wanted != "generic") throw std::invalid_argument("this CPU has no " + wanted);
  chosen = ASR_SERVE_SET(generic);
}

const StreamingKernels<float>& streaming_of(float) { return *chosen.streaming_f32; }
const StreamingKernels<bf16>& streaming_of(bf16) { return *chosen.streaming_b16; }
const DecoderKernels<float>& decoder_of(float) { return *chosen.decoder_f32; }
const DecoderKernels<bf16>& decoder_of(bf16) { return *chosen.decoder_b16; }

const Int8PageKernels<float>& int8_pages_of(float) { return *chosen.int8_pages_f32; }
const Int8PageKernels<bf16>& int8_pages_of(bf16) { return *chosen.int8_pages_b16; }

using Tensor = nb::ndarray<nb::device::cpu>;

bool is_bf16(const Tensor& x) {
  if (x.dtype() == nb::dtype<float>()) return false;
  require(x.dtype().code == uint8_t(nb::dlpack::dtype_code::Bfloat) && x.dtype().bits == 16,
          "dtype must be float32 or bfloat16");
  return true;
}

bool contiguous_from(const Tensor& x, size_t axis) {
  int64_t expected = 1;
  for (size_t i = x.ndim(); i-- > axis;) {
    if (x.shape(i) > 1 && x.stride(i) != expected) return false;
    expected *= int64_t(x.shape(i));
  }
  return true;
}

Pages pages_of(const Tensor& pool, int64_t layer) {
  // pool: (pages, layers, 2, heads, head_dim * PAGE)
  require(pool.ndim() == 5 && contiguous_from(pool, 1) && pool.shape(2) == 2 && pool.shape(4) % PAGE == 0,
          "pool must be (pages, layers, 2, heads, head_dim * 16)");
  require(layer >= 0 && layer < int64_t(pool.shape(1)), "layer out of range");
  require(pool.shape(4) / PAGE <= 512, "head_dim must be at most 512");
  return {pool.data(), pool.stride(0), layer * pool.stride(1), int(pool.shape(3)), int(pool.shape(4) / PAGE)};
}

template <typename F>
void with_type(const Tensor& x, F call) {
  if (is_bf16(x)) {
    nb::gil_scoped_release release;
    call(bf16{}, *chosen.b16);
  } else {
    nb::gil_scoped_release release;
    call(float{}, *chosen.f32);
  }
}

void rope(Tensor qkv, Array<int64_t> positions, Array<float> cos, Array<float> sin) {
  require(qkv.ndim() == 4 && qkv.shape(1) == 3 && contiguous_from(qkv, 0), "qkv must be (rows, 3, heads, head_dim)");
  require(positions.size() == qkv.shape(0), "one position per row");
  require(cos.ndim() == 2 && sin.ndim() == 2 && cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1) &&
              2 * cos.shape(1) <= qkv.shape(3),
          "cos, sin must be (positions, half)");
  for (size_t i = 0; i < positions.size(); ++i)
    require(positions.data()[i] >= 0 && positions.data()[i] < int64_t(cos.shape(0)), "position out of range");
  with_type(qkv, [&](auto type, const auto& kernels) {
    kernels.rope(static_cast<decltype(type)*>(qkv.data()), positions.data(), cos.data(), sin.data(),
                 int64_t(qkv.shape(0)), int(qkv.shape(2)), int(qkv.shape(3)), int(cos.shape(1)), parallel_for);
  });
}

void softmax(Tensor scores, Array<int64_t> lengths, float scale) {
  require(scores.ndim() == 4 && contiguous_from(scores, 0), "scores must be (batch, heads, queries, keys)");
  require(lengths.size() == scores.shape(0), "one length per batch row");
  for (size_t i = 0; i < lengths.size(); ++i) require(lengths.data()[i] >= 1, "a length must be at least 1");
  with_type(scores, [&](auto type, const auto& kernels) {
    kernels.softmax(static_cast<decltype(type)*>(scores.data()), lengths.data(), int64_t(scores.shape(0)),
                    int64_t(scores.shape(1) * scores.shape(2)), int64_t(scores.shape(3)), scale, parallel_for);
  });
}

void check_table(const Tensor& pool, const int32_t* table, int64_t entries) {
  for (int64_t i = 0; i < entries; ++i)
    require(table[i] >= 0 && table[i] < int64_t(pool.shape(0)), "page out of range");
}

// kv (frames, layers, 2, heads * head_dim) into one sequence's pages, from position 0; in 8 bits, or as it is.
template <bool INT8>
void store(Tensor pool, Tensor kv, Array<int32_t> table) {
  Pages first = pages_of(pool, 0);
  require(kv.dtype() == pool.dtype(), "kv and pool must have one dtype");
  require(kv.ndim() == 4 && contiguous_from(kv, 1) && kv.shape(1) == pool.shape(1) && kv.shape(2) == 2 &&
              int(kv.shape(3)) == first.heads * first.head_dim,
          "kv must be (frames, layers, 2, heads * head_dim)");
  int64_t frames = int64_t(kv.shape(0)), used = (frames + PAGE - 1) / PAGE;
  require(used <= int64_t(table.size()), "table too short");
  require(!INT8 || first.head_dim >= 4, "heads of 8-bit pages have 4 numbers or more");
  check_table(pool, table.data(), used);
  with_type(pool, [&](auto type, const auto& kernels) {
    using T = decltype(type);
    auto one = [&](int64_t item) {  // one page of one layer
      int64_t page = item % used, layer = item / used;
      Pages pages = first;
      pages.layer_offset = layer * pool.stride(1);
      const T* from = static_cast<const T*>(kv.data()) + page * PAGE * kv.stride(0) + layer * kv.stride(1);
      const auto write = INT8 ? int8_pages_of(T{}).store : kernels.store;
      write(pages, from, kv.stride(0), std::min<int64_t>(PAGE, frames - page * PAGE), table.data() + page, 0);
    };
    parallel_for(used * int64_t(pool.shape(1)),
                 [](void* context, int64_t item) { (*static_cast<decltype(one)*>(context))(item); }, &one);
  });
}

// K and V of qkv (rows, 3, heads * head_dim), one position per row, each into its own sequence's pages.
void append(Tensor pool, int64_t layer, Tensor qkv, Array<int32_t> tables, Array<int64_t> positions) {
  Pages pages = pages_of(pool, layer);
  int64_t width = int64_t(pages.heads) * pages.head_dim, rows = qkv.ndim() ? int64_t(qkv.shape(0)) : 0;
  require(qkv.dtype() == pool.dtype(), "qkv and pool must have one dtype");
  require(qkv.ndim() == 3 && contiguous_from(qkv, 0) && qkv.shape(1) == 3 && int64_t(qkv.shape(2)) == width,
          "qkv must be (rows, 3, heads * head_dim)");
  require(tables.ndim() == 2 && int64_t(tables.shape(0)) == rows && int64_t(positions.size()) == rows,
          "one table and one position per row");
  for (int64_t i = 0; i < rows; ++i) {
    int64_t entry = positions.data()[i] / PAGE;
    require(positions.data()[i] >= 0 && entry < int64_t(tables.shape(1)), "table too short");
    check_table(pool, tables.data() + i * tables.shape(1) + entry, 1);
  }
  with_type(pool, [&](auto type, const auto& kernels) {
    using T = decltype(type);
    for (int64_t i = 0; i < rows; ++i)
      kernels.store(pages, static_cast<const T*>(qkv.data()) + (i * 3 + 1) * width, 3 * width, 1,
                    tables.data() + i * tables.shape(1), positions.data()[i]);
  });
}

// Checks the arguments of attention over pages; returns the pages of the layer.
Pages attention_pages(const Tensor& pool, int64_t layer, const Tensor& q, const Tensor& out, const Array<int32_t>& tables,
                      const Array<int64_t>& lengths) {
  Pages pages = pages_of(pool, layer);
  int64_t paged = int64_t(pages.heads) * pages.head_dim, rows = q.ndim() ? int64_t(q.shape(0)) : 0;
  require(q.dtype() == pool.dtype() && out.dtype() == pool.dtype(), "q, out and pool must have one dtype");
  require(q.ndim() == 2 && contiguous_from(q, 1) && q.shape(1) > 0 && int64_t(q.shape(1)) % paged == 0,
          "q must be (rows, heads * head_dim), with a multiple of the pool's heads");
  int64_t width = int64_t(q.shape(1));
  require(out.ndim() == 2 && contiguous_from(out, 0) && int64_t(out.shape(0)) == rows && int64_t(out.shape(1)) == width,
          "out must be (rows, heads * head_dim)");
  require(tables.ndim() == 2 && int64_t(tables.shape(0)) == rows && int64_t(lengths.size()) == rows,
          "one table and one length per row");
  for (int64_t i = 0; i < rows; ++i) {
    int64_t length = lengths.data()[i];
    require(length >= 1 && length <= int64_t(tables.shape(1)) * PAGE, "length outside the table");
    check_table(pool, tables.data() + i * tables.shape(1), (length + PAGE - 1) / PAGE);
  }
  return pages;
}

void attend_int8(Tensor pool, int64_t layer, Tensor q, Tensor out, Array<int32_t> tables, Array<int64_t> lengths,
                 float scale) {
  const Pages pages = attention_pages(pool, layer, q, out, tables, lengths);
  require(int64_t(q.shape(1)) == int64_t(pages.heads) * pages.head_dim, "q must be (rows, heads * head_dim)");
  require(pages.head_dim >= 4, "heads of 8-bit pages have 4 numbers or more");
  with_type(pool, [&](auto type, const auto&) {
    using T = decltype(type);
    int8_pages_of(type).attend(pages, static_cast<const T*>(q.data()), q.stride(0), static_cast<T*>(out.data()),
                               tables.data(), int64_t(tables.shape(1)), lengths.data(), int64_t(q.shape(0)), scale,
                               parallel_for);
  });
}

void attend(Tensor pool, int64_t layer, Tensor q, Tensor out, Array<int32_t> tables, Array<int64_t> lengths,
            float scale, int64_t window) {
  const Pages pages = attention_pages(pool, layer, q, out, tables, lengths);
  require(window >= 0, "window must be 0, for all positions, or more");
  const int64_t paged = int64_t(pages.heads) * pages.head_dim, rows = int64_t(q.shape(0)), width = int64_t(q.shape(1));
  with_type(pool, [&](auto type, const auto& kernels) {
    using T = decltype(type);
    if (width > paged)
      return decoder_of(type).attend_grouped({pages, rows, int(width / paged), q.stride(0), tables.data(),
                                              int64_t(tables.shape(1)), lengths.data(), window, scale},
                                             static_cast<const T*>(q.data()), static_cast<T*>(out.data()),
                                             parallel_for);
    kernels.attend(pages, static_cast<const T*>(q.data()), q.stride(0), static_cast<T*>(out.data()), tables.data(),
                   int64_t(tables.shape(1)), lengths.data(), rows, int(width / paged), window, scale, parallel_for);
  });
}

// Rows of a matrix: the same number of them, all of one width.
int64_t rows_of(const Tensor& x, int64_t width, const char* what) {
  require(x.ndim() == 2 && contiguous_from(x, 0) && int64_t(x.shape(1)) == width, what);
  return int64_t(x.shape(0));
}

void rms_norm(Tensor x, Array<float> weight, Tensor out, float eps) {
  const int64_t width = int64_t(weight.size()), rows = rows_of(x, width, "x must be (rows, width)");
  require(weight.ndim() == 1 && width > 0, "weight must be (width,)");
  require(out.dtype() == x.dtype() && rows_of(out, width, "out must be (rows, width)") == rows,
          "x and out must have one shape and dtype");
  with_type(x, [&](auto type, const auto&) {
    using T = decltype(type);
    decoder_of(type).rms_norm(static_cast<const T*>(x.data()), weight.data(), static_cast<T*>(out.data()), rows, width,
                              eps, parallel_for);
  });
}

void rotate_append(Tensor pool, int64_t layer, Tensor qkv, std::optional<Array<float>> norms, float eps,
                   Array<float> cos, Array<float> sin, Array<int64_t> positions, Array<int32_t> tables) {
  Pages pages = pages_of(pool, layer);
  require(qkv.dtype() == pool.dtype(), "qkv and pool must have one dtype");
  require(qkv.ndim() == 2 && contiguous_from(qkv, 0) && qkv.shape(1) % pages.head_dim == 0,
          "qkv must be (rows, heads * head_dim)");
  const int64_t rows = int64_t(qkv.shape(0)), heads = int64_t(qkv.shape(1)) / pages.head_dim - 2 * pages.heads;
  require(heads >= 1, "qkv must have queries beside the keys and values of the pool's heads");
  require(pages.head_dim % 2 == 0, "head_dim must be even");
  require(!norms || (norms->ndim() == 2 && int64_t(norms->shape(0)) == heads + pages.heads &&
                     int64_t(norms->shape(1)) == pages.head_dim),
          "norms must be (heads of queries and keys, head_dim)");
  require(cos.ndim() == 2 && sin.ndim() == 2 && cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1) &&
              2 * int64_t(cos.shape(1)) == pages.head_dim,
          "cos, sin must be (positions, head_dim / 2)");
  require(tables.ndim() == 2 && int64_t(tables.shape(0)) == rows && int64_t(positions.size()) == rows,
          "one table and one position per row");
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t position = positions.data()[i];
    require(position >= 0 && position < int64_t(cos.shape(0)), "position out of range");
    require(position / PAGE < int64_t(tables.shape(1)), "table too short");
    check_table(pool, tables.data() + i * tables.shape(1) + position / PAGE, 1);
  }
  const Rotation rotation{int(heads), pages.heads, pages.head_dim, norms ? norms->data() : nullptr, eps,
                          cos.data(), sin.data(), positions.data()};
  with_type(pool, [&](auto type, const auto&) {
    using T = decltype(type);
    decoder_of(type).rotate_append(static_cast<T*>(qkv.data()), rows, rotation, pages, tables.data(),
                                   int64_t(tables.shape(1)), parallel_for);
  });
}

void gate(Tensor gate_up, Tensor out, const std::string& activation) {
  require(activation == "silu" || activation == "gelu_tanh", "activation must be silu or gelu_tanh");
  const int64_t width = out.ndim() == 2 ? int64_t(out.shape(1)) : 0;
  const int64_t rows = rows_of(out, width, "out must be (rows, width)");
  require(gate_up.dtype() == out.dtype() && rows_of(gate_up, 2 * width, "gate_up must be (rows, 2 * width)") == rows,
          "gate_up and out must have as many rows, and one dtype");
  with_type(out, [&](auto type, const auto&) {
    using T = decltype(type);
    const T* both = static_cast<const T*>(gate_up.data());
    decoder_of(type).gate(both, both + width, 2 * width, static_cast<T*>(out.data()), rows, width,
                          activation == "silu" ? Activation::silu : Activation::gelu_tanh, parallel_for);
  });
}

// Without a weight the logits are float, exact enough by themselves, and hidden is not looked at.
void pick(Tensor logits, std::optional<Tensor> hidden, std::optional<Tensor> weight, Array<int64_t> tokens,
          Array<float> logprobs) {
  require(logits.ndim() == 2 && contiguous_from(logits, 0), "logits must be (rows, vocab)");
  require(tokens.size() == logits.shape(0) && logprobs.size() == logits.shape(0), "one result per row");
  if (weight) {
    require(hidden && logits.dtype() == hidden->dtype() && logits.dtype() == weight->dtype(), "one dtype");
    require(hidden->ndim() == 2 && contiguous_from(*hidden, 0) && hidden->shape(0) == logits.shape(0),
            "hidden must be (rows, dim)");
    require(weight->ndim() == 2 && contiguous_from(*weight, 0) && weight->shape(0) == logits.shape(1) &&
                weight->shape(1) == hidden->shape(1),
            "weight must be (vocab, dim)");
  } else {
    require(!is_bf16(logits), "bfloat16 logits need hidden and weight");
    hidden = std::nullopt;
  }
  with_type(logits, [&](auto type, const auto& kernels) {
    using T = decltype(type);
    kernels.pick(static_cast<const T*>(logits.data()), hidden ? static_cast<const T*>(hidden->data()) : nullptr,
                 weight ? static_cast<const T*>(weight->data()) : nullptr, int64_t(logits.shape(0)),
                 int64_t(logits.shape(1)), hidden ? int(hidden->shape(1)) : 0, tokens.data(), logprobs.data(),
                 parallel_for);
  });
}

void tanh_norm(Array<float> x, Tensor out, float eps) {
  require(contiguous_from(out, 0) && out.size() == x.size() && x.size() > 0, "x and out must have one shape");
  with_type(out, [&](auto type, const auto& kernels) {
    kernels.tanh_norm(x.data(), static_cast<decltype(type)*>(out.data()), int64_t(x.size()), eps, parallel_for);
  });
}

void lstm(Array<float> gates, Array<float> weight, Array<int64_t> offsets, Array<int64_t> lengths, Array<float> h,
          Array<float> c, Array<float> out) {
  require(gates.ndim() == 2 && h.ndim() == 2 && c.ndim() == 2 && out.ndim() == 2 && weight.ndim() == 2,
          "gates, weight, h, c and out are matrices");
  size_t steps = gates.shape(0), rows = h.shape(0), width = h.shape(1);
  require(width % 4 == 0 && gates.shape(1) == 4 * width && weight.shape(0) == width && weight.shape(1) == 4 * width,
          "gates must be (steps, 4 * width), weight (width, 4 * width)");
  require(c.shape(0) == rows && c.shape(1) == width && lengths.size() == rows && offsets.size() == rows &&
              out.shape(0) == steps && out.shape(1) == width,
          "h, c must be (rows, width), out (steps, width), offsets and lengths (rows,)");
  for (size_t i = 0; i < rows; ++i)
    require(lengths.data()[i] >= 0 && offsets.data()[i] >= 0 && offsets.data()[i] <= int64_t(steps) &&
                lengths.data()[i] <= int64_t(steps) - offsets.data()[i],
            "a row reaches outside the steps");
  nb::gil_scoped_release release;
  chosen.lstm_f32(gates.data(), weight.data(), offsets.data(), lengths.data(), h.data(), c.data(), out.data(), int64_t(rows),
           int(width), parallel_for);
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> shape) {
  return x.ndim() == shape.size() &&
         std::equal(shape.begin(), shape.end(), x.shape_ptr(), [](int64_t a, size_t b) { return size_t(a) == b; });
}

// A view whose last axis only is known to be contiguous.
bool has_view(const Tensor& x, std::initializer_list<int64_t> shape) {
  return has_shape(x, shape) && contiguous_from(x, x.ndim() - 1);
}

template <typename T>
Frames<T> frames_of(const Tensor& x, int64_t head) {
  return {static_cast<T*>(x.data()), x.stride(0), x.stride(1), head};
}

// Which rows of the state a step is about: no row may be outside of it.
Step step_of(int64_t rows, int64_t frames, size_t slots, const Array<int64_t>& slot, const int64_t* seen,
             const Array<int64_t>& live) {
  require(slot.ndim() == 1 && live.ndim() == 1 && int64_t(slot.size()) == rows && int64_t(live.size()) == rows,
          "rows, seen and frames must be (n,)");
  for (int64_t i = 0; i < rows; ++i) {
    require(slot.data()[i] >= 0 && slot.data()[i] < int64_t(slots), "a row outside the state");
    require(live.data()[i] >= 0 && live.data()[i] <= frames, "more frames than the chunk has");
  }
  return {rows, frames, slot.data(), seen, live.data()};
}

void window_attention(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Array<int64_t> rows,
                      Array<int64_t> seen, Array<int64_t> frames, std::optional<Tensor> bias, int64_t left,
                      int64_t block, Tensor out) {
  require(q.ndim() == 4 && keys.ndim() == 4,
          "q must be (n, E, heads, head_dim), keys (slots, heads, capacity, head_dim)");
  const int64_t n = q.shape(0), steps = q.shape(1), heads = q.shape(2), dim = q.shape(3);
  const int64_t slots = keys.shape(0), capacity = keys.shape(2);
  for (const Tensor* x : {&k, &v, &keys, &values, &out})
    require(x->dtype() == q.dtype(), "q, k, v, keys, values and out must have one dtype");
  for (const Tensor* x : {&q, &k, &v})
    require(has_view(*x, {n, steps, heads, dim}), "q, k, v must be (n, E, heads, head_dim), contiguous along head_dim");
  for (const Tensor* x : {&keys, &values})
    require(has_view(*x, {slots, heads, capacity, dim}),
            "keys, values must be (slots, heads, capacity, head_dim), contiguous along head_dim");
  require(has_view(out, {n, steps, heads * dim}), "out must be (n, E, heads * head_dim), contiguous along the last");
  require(dim >= 1, "head_dim must be at least 1");
  require(block >= 1 && steps % block == 0, "E must be a multiple of block");
  require(left >= 0 && left <= capacity && steps <= capacity - left, "the ring must hold left + E frames");
  const Step step = step_of(n, steps, keys.shape(0), rows, seen.data(), frames);
  require(seen.ndim() == 1 && int64_t(seen.size()) == n, "rows, seen and frames must be (n,)");
  for (int64_t i = 0; i < n; ++i)
    require(frames.data()[i] == 0 ||
                (seen.data()[i] >= 0 && seen.data()[i] < int64_t(1) << 62 && seen.data()[i] % block == 0),
            "seen must be a multiple of block");
  Bias scores{};
  if (bias) {
    scores.single = bias->dtype() == nb::dtype<float>();
    require(scores.single || bias->dtype() == q.dtype(), "bias must be float32, or of the dtype of q");
    require(has_shape(*bias, {n, heads, steps, left + steps}), "bias must be (n, heads, E, left + E)");
    scores = {bias->data(), scores.single, bias->stride(0), bias->stride(1), bias->stride(2), bias->stride(3)};
  }
  with_type(q, [&](auto type, const auto&) {
    using T = decltype(type);
    auto ring = [](const Tensor& x) {
      return Ring<T>{static_cast<T*>(x.data()), x.stride(0), x.stride(1), x.stride(2)};
    };
    auto given = [](const Tensor& x) { return frames_of<const T>(x, x.stride(2)); };
    streaming_of(type).window_attention({step, heads, dim, capacity, left, block, given(q), given(k), given(v),
                                         ring(keys), ring(values), scores, frames_of<T>(out, dim)},
                                        parallel_for);
  });
}

void causal_conv(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor tail, Array<int64_t> rows,
                 Array<int64_t> frames, Tensor out) {
  require(x.ndim() == 3 && weight.ndim() == 2 && tail.ndim() == 3 && weight.shape(1) >= 1,
          "x must be (n, E, C), weight (C, K), tail (slots, K - 1, C)");
  const int64_t n = x.shape(0), steps = x.shape(1), channels = x.shape(2), taps = weight.shape(1);
  require(weight.dtype() == x.dtype() && tail.dtype() == x.dtype() && out.dtype() == x.dtype() &&
              (!bias || bias->dtype() == x.dtype()),
          "x, weight, bias, tail and out must have one dtype");
  require(has_view(x, {n, steps, channels}) && has_view(out, {n, steps, channels}),
          "x and out must be (n, E, C), contiguous along C");
  require(has_shape(weight, {channels, taps}), "weight must be (C, K)");
  require(!bias || has_view(*bias, {channels}), "bias must be (C,)");
  require(has_view(tail, {int64_t(tail.shape(0)), taps - 1, channels}),
          "tail must be (slots, K - 1, C), contiguous along C");
  const Step step = step_of(n, steps, tail.shape(0), rows, nullptr, frames);
  with_type(x, [&](auto type, const auto&) {
    using T = decltype(type);
    streaming_of(type).causal_conv(
        {step, channels, taps, frames_of<const T>(x, 0), static_cast<const T*>(weight.data()), weight.stride(0),
         weight.stride(1), bias ? static_cast<const T*>(bias->data()) : nullptr, static_cast<T*>(tail.data()),
         tail.stride(0), tail.stride(1), frames_of<T>(out, 0)},
        parallel_for);
  });
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native kernels of asr-serve; asr_serve.kernels.reference is the same in torch.";
  choose("auto");
  gomp_parallel = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  m.attr("PAGE") = PAGE;
  m.attr("INTERFACE") = INTERFACE;
  m.def("isa", [] { return std::string(chosen.name); }, "The instruction set in use: generic, avx2 or avx512.");
  m.def("choose_isa", &choose, nb::arg("isa"), "Force an instruction set, or 'auto'. For tests.");
  m.def("shares_threads", [] { return gomp_parallel != nullptr; }, "Whether torch's OpenMP pool was found.");
  m.def("set_threads", [](unsigned n) { thread_count = n ? n : 1; }, nb::arg("threads"));
  m.def("rope", &rope, nb::arg("qkv").noconvert(), nb::arg("positions").noconvert(), nb::arg("cos").noconvert(), nb::arg("sin").noconvert());
  m.def("softmax", &softmax, nb::arg("scores").noconvert(), nb::arg("lengths").noconvert(), nb::arg("scale"));
  m.def("store", &store<false>, nb::arg("pool").noconvert(), nb::arg("kv").noconvert(), nb::arg("table").noconvert());
  m.def("store_int8", &store<true>, nb::arg("pool").noconvert(), nb::arg("kv").noconvert(), nb::arg("table").noconvert());
  m.def("append", &append, nb::arg("pool").noconvert(), nb::arg("layer"), nb::arg("qkv").noconvert(), nb::arg("tables").noconvert(), nb::arg("positions").noconvert());
  m.def("attend", &attend, nb::arg("pool").noconvert(), nb::arg("layer"), nb::arg("q").noconvert(), nb::arg("out").noconvert(), nb::arg("tables").noconvert(),
        nb::arg("lengths").noconvert(), nb::arg("scale"), nb::arg("window") = 0);
  m.def("attend_int8", &attend_int8, nb::arg("pool").noconvert(), nb::arg("layer"), nb::arg("q").noconvert(), nb::arg("out").noconvert(),
        nb::arg("tables").noconvert(), nb::arg("lengths").noconvert(), nb::arg("scale"));
  m.def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("out").noconvert(), nb::arg("eps"));
  m.def("rotate_append", &rotate_append, nb::arg("pool").noconvert(), nb::arg("layer"), nb::arg("qkv").noconvert(), nb::arg("norms").noconvert().none(), nb::arg("eps"),
        nb::arg("cos").noconvert(), nb::arg("sin").noconvert(), nb::arg("positions").noconvert(), nb::arg("tables").noconvert());
  m.def("gate", &gate, nb::arg("gate_up").noconvert(), nb::arg("out").noconvert(), nb::arg("activation"));
  m.def("tanh_norm", &tanh_norm, nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::arg("eps"));
  m.def("lstm", &lstm, nb::arg("gates").noconvert(), nb::arg("weight").noconvert(), nb::arg("offsets").noconvert(),
        nb::arg("lengths").noconvert(), nb::arg("h").noconvert(), nb::arg("c").noconvert(), nb::arg("out").noconvert());
  m.def("pick", &pick, nb::arg("logits").noconvert(), nb::arg("hidden").noconvert().none(), nb::arg("weight").noconvert().none(), nb::arg("tokens").noconvert(),
        nb::arg("logprobs").noconvert());
  m.def("window_attention", &window_attention, nb::arg("q").noconvert(), nb::arg("k").noconvert(),
        nb::arg("v").noconvert(), nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("rows").noconvert(),
        nb::arg("seen").noconvert(), nb::arg("frames").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("left"),
        nb::arg("block"), nb::arg("out").noconvert());
  m.def("causal_conv", &causal_conv, nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
        nb::arg("bias").noconvert().none(), nb::arg("tail").noconvert(), nb::arg("rows").noconvert(),
        nb::arg("frames").noconvert(), nb::arg("out").noconvert());
  add_int8(m, parallel_for);
  add_bf16(m, parallel_for);
  add_attention(m, parallel_for, [] { return chosen.attend_clips_f32; });
  add_decoder_layers(m, {&chosen.f32, &chosen.b16, &chosen.decoder_f32, &chosen.decoder_b16, &chosen.int8_pages_f32,
                         &chosen.int8_pages_b16},
                     [] { return gomp_parallel ? thread_count : 1; }, parallel_for);
  add_layers(m, &chosen.run_layers, team_for);
  add_voice_activity(m, &chosen.vad_encode, parallel_for);
  m.def(
      "address", [](Tensor x) { return reinterpret_cast<uintptr_t>(x.data()); }, nb::arg("tensor").noconvert(),
      "Where a tensor's numbers lie, as the kernels see it. For tests: nothing is copied on the way in.");
}
