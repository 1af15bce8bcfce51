// Voice activity for WebAssembly: the network of models/auxiliary/silero.py, in freestanding C with 128-bit SIMD.
//
// One instance serves many callers. Each has a slot of state; a step takes one window of 512 samples (32 ms at 16 kHz)
// of up to BATCH callers. There are no imports, and memory has a fixed size: nothing is allocated after instantiation.
// Every sum has one order, whatever else is in the batch, and WebAssembly rounds as IEEE 754 says: a window's
// probability is the same to the last bit in every batch, in every browser and on every CPU.
//
// build_vad.py generates weights.h (weights, window and twiddle factors) and compiles this file.

#include <stdint.h>
#include <wasm_simd128.h>

#include "weights.h"

#define EXPORT(name) __attribute__((export_name(#name)))
#define INLINE static inline __attribute__((always_inline))

enum {
    WINDOW = 512,
    CONTEXT = 64,
    FRAMES = 4,
    FFT = 256,
    HOP = 128,
    BINS = 129,
    WIDTH = 128,
    SLOTS = 1024,
    BATCH = 64,
    BLOCK = 4,  // callers whose products share each load of a weight
};

typedef struct {
    float context[CONTEXT];  // the last samples of the window before
    float h[WIDTH];
    float c[WIDTH];
} State;

static _Alignas(16) State states[SLOTS];
static uint32_t seen[SLOTS];  // the step that a slot was last in
static uint32_t steps;
static _Alignas(16) int16_t input[BATCH][WINDOW];
static uint32_t slots[BATCH];
static _Alignas(16) float probabilities[BATCH];

// Of the callers of a block. Activations are [frame][channel], so that the input of a convolution of three frames is
// contiguous: a convolution is a product whose rows overlap.
static _Alignas(16) float audio[CONTEXT + WINDOW + CONTEXT];
static _Alignas(16) float magnitudes[BLOCK][(FRAMES + 2) * BINS];  // a frame of zeros before and after
static _Alignas(16) float first[BLOCK][(FRAMES + 1) * 128];        // a frame of zeros before
static _Alignas(16) float second[BLOCK][2 * 64];
static _Alignas(16) float third[BLOCK][64];
static _Alignas(16) float joined[BLOCK][2 * WIDTH];  // the encoder's vector, then h
static _Alignas(16) float gates[BLOCK][4 * WIDTH];

INLINE v128_t load(const float *at) { return wasm_v128_load(at); }
INLINE v128_t splat(float value) { return wasm_f32x4_splat(value); }
INLINE v128_t add(v128_t a, v128_t b) { return wasm_f32x4_add(a, b); }
INLINE v128_t sub(v128_t a, v128_t b) { return wasm_f32x4_sub(a, b); }
INLINE v128_t mul(v128_t a, v128_t b) { return wasm_f32x4_mul(a, b); }

// e^x, relative error about 1e-7: 2^n by its bits, the rest by a polynomial (Cephes' expf).
INLINE v128_t exponential(v128_t x) {
    x = wasm_f32x4_pmin(splat(87.0f), wasm_f32x4_pmax(splat(-87.0f), x));
    v128_t n = wasm_f32x4_nearest(mul(x, splat(1.44269504f)));
    v128_t r = sub(sub(x, mul(n, splat(0.693359375f))), mul(n, splat(-2.12194440e-4f)));
    v128_t p = splat(1.9875691500e-4f);
    p = add(mul(p, r), splat(1.3981999507e-3f));
    p = add(mul(p, r), splat(8.3334519073e-3f));
    p = add(mul(p, r), splat(4.1665795894e-2f));
    p = add(mul(p, r), splat(1.6666665459e-1f));
    p = add(mul(p, r), splat(5.0000001201e-1f));
    p = add(add(mul(mul(p, r), r), r), splat(1.0f));
    v128_t power = wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_splat(127)), 23);
    return mul(p, power);
}

INLINE v128_t sigmoid(v128_t x) {
    return wasm_f32x4_div(splat(1.0f), add(splat(1.0f), exponential(wasm_f32x4_neg(x))));
}

INLINE v128_t hyperbolic_tangent(v128_t x) { return sub(mul(splat(2.0f), sigmoid(mul(splat(2.0f), x))), splat(1.0f)); }

// y[row][8 * part + i] of `rows` rows and `parts` groups of eight outputs: rows * parts = 4, which fills the registers.
// Weights are [group][k][8].
INLINE void product_tile(const float *const *x, float *const *y, const float *weights, const float *bias, int k_count,
                         int rows, int parts, int relu) {
    v128_t sums[4][2];
    for (int part = 0; part < parts; part++)
        for (int row = 0; row < rows; row++)
            for (int half = 0; half < 2; half++)
                sums[part * rows + row][half] = load(bias + part * 8 + half * 4);
    for (int k = 0; k < k_count; k++) {
        for (int part = 0; part < parts; part++) {
            const float *at = weights + (part * k_count + k) * 8;
            v128_t low = load(at), high = load(at + 4);
            for (int row = 0; row < rows; row++) {
                v128_t value = wasm_v128_load32_splat(x[row] + k);
                sums[part * rows + row][0] = add(sums[part * rows + row][0], mul(value, low));
                sums[part * rows + row][1] = add(sums[part * rows + row][1], mul(value, high));
            }
        }
    }
    for (int part = 0; part < parts; part++)
        for (int row = 0; row < rows; row++)
            for (int half = 0; half < 2; half++) {
                v128_t sum = sums[part * rows + row][half];
                if (relu) sum = wasm_f32x4_pmax(splat(0.0f), sum);
                wasm_v128_store(y[row] + part * 8 + half * 4, sum);
            }
}

#define TILED(ROWS, PARTS)                                                                                     \
    static __attribute__((noinline)) void product_##ROWS(const float *const *x, float *const *y,               \
                                                         const float *weights, const float *bias, int k_count, \
                                                         int n_count, int relu) {                              \
        for (int n = 0; n < n_count; n += 8 * PARTS) {                                                         \
            float *to[ROWS];                                                                                   \
            for (int row = 0; row < ROWS; row++) to[row] = y[row] + n;                                         \
            product_tile(x, to, weights + n * k_count, bias + n, k_count, ROWS, PARTS, relu);                  \
        }                                                                                                      \
    }
TILED(1, 4)
TILED(2, 2)
TILED(3, 1)
TILED(4, 1)

static void product(const float *const *x, float *const *y, const float *weights, const float *bias, int k_count,
                    int n_count, int rows, int relu) {
    switch (rows) {
        case 1: product_1(x, y, weights, bias, k_count, n_count, relu); break;
        case 2: product_2(x, y, weights, bias, k_count, n_count, relu); break;
        case 3: product_3(x, y, weights, bias, k_count, n_count, relu); break;
        default: product_4(x, y, weights, bias, k_count, n_count, relu);
    }
}

// Magnitudes of the four spectra of a window, which are the four lanes of every vector here: a real transform of 256
// points as a complex one of 128 (even samples are the real parts).
static void spectra(const float *samples, float *out) {
    static v128_t re[FFT / 2], im[FFT / 2];
    for (int i = 0; i < FFT; i += 4) {
        v128_t a = load(samples + i), b = load(samples + HOP + i);
        v128_t c = load(samples + 2 * HOP + i), d = load(samples + 3 * HOP + i);
        v128_t ab = wasm_i32x4_shuffle(a, b, 0, 4, 1, 5), cd = wasm_i32x4_shuffle(c, d, 0, 4, 1, 5);
        v128_t ab2 = wasm_i32x4_shuffle(a, b, 2, 6, 3, 7), cd2 = wasm_i32x4_shuffle(c, d, 2, 6, 3, 7);
        int even = bit_reversed[i / 2], odd = bit_reversed[i / 2 + 1];
        re[even] = mul(wasm_i64x2_shuffle(ab, cd, 0, 2), splat(hann[i]));
        im[even] = mul(wasm_i64x2_shuffle(ab, cd, 1, 3), splat(hann[i + 1]));
        re[odd] = mul(wasm_i64x2_shuffle(ab2, cd2, 0, 2), splat(hann[i + 2]));
        im[odd] = mul(wasm_i64x2_shuffle(ab2, cd2, 1, 3), splat(hann[i + 3]));
    }
    for (int half = 1; half < FFT / 2; half *= 2)
        for (int j = 0; j < half; j++) {
            // e^(-2 pi i j / (2 half)), from a table of 256 points
            v128_t c = splat(cosines[j * (FFT / 2 / half)]), s = splat(sines[j * (FFT / 2 / half)]);
            for (int a = j; a < FFT / 2; a += 2 * half) {
                int b = a + half;
                v128_t x = add(mul(re[b], c), mul(im[b], s)), y = sub(mul(im[b], c), mul(re[b], s));
                re[b] = sub(re[a], x);
                im[b] = sub(im[a], y);
                re[a] = add(re[a], x);
                im[a] = add(im[a], y);
            }
        }
    for (int k = 0; k < BINS; k++) {
        int p = k % (FFT / 2), q = (FFT / 2 - k) % (FFT / 2);
        v128_t even_re = add(re[p], re[q]), even_im = sub(im[p], im[q]);
        v128_t odd_re = add(im[p], im[q]), odd_im = sub(re[q], re[p]);
        v128_t c = splat(cosines[k]), s = splat(sines[k]);
        v128_t x = add(even_re, add(mul(odd_re, c), mul(odd_im, s)));
        v128_t y = add(even_im, sub(mul(odd_im, c), mul(odd_re, s)));
        v128_t magnitude = mul(splat(0.5f), wasm_f32x4_sqrt(add(mul(x, x), mul(y, y))));
        wasm_v128_store32_lane(out + k, magnitude, 0);
        wasm_v128_store32_lane(out + BINS + k, magnitude, 1);
        wasm_v128_store32_lane(out + 2 * BINS + k, magnitude, 2);
        wasm_v128_store32_lane(out + 3 * BINS + k, magnitude, 3);
    }
}

static void window_spectra(State *state, const int16_t *pcm, float *out) {
    for (int i = 0; i < CONTEXT; i += 4) wasm_v128_store(audio + i, load(state->context + i));
    for (int i = 0; i < WINDOW; i += 8) {
        v128_t eight = wasm_v128_load(pcm + i);
        v128_t low = wasm_f32x4_convert_i32x4(wasm_i32x4_extend_low_i16x8(eight));
        v128_t high = wasm_f32x4_convert_i32x4(wasm_i32x4_extend_high_i16x8(eight));
        wasm_v128_store(audio + CONTEXT + i, mul(low, splat(1.0f / 32768)));
        wasm_v128_store(audio + CONTEXT + i + 4, mul(high, splat(1.0f / 32768)));
    }
    // The last spectrum runs past the window, whose end is mirrored there without its last sample.
    const int end = CONTEXT + WINDOW;
    for (int i = 0; i < CONTEXT; i++) audio[end + i] = audio[end - 2 - i];
    for (int i = 0; i < CONTEXT; i += 4) wasm_v128_store(state->context + i, load(audio + end - CONTEXT + i));
    spectra(audio, out);
}

// Up to four callers: their windows are input[begin ...].
static void step_block(uint32_t begin, int rows) {
    State *mine[BLOCK];
    const float *from[BLOCK];
    float *to[BLOCK];
    for (int row = 0; row < rows; row++) {
        mine[row] = &states[slots[begin + row]];
        window_spectra(mine[row], input[begin + row], magnitudes[row] + BINS);
        for (int frame = 0; frame < FRAMES; frame++) {
            from[frame] = magnitudes[row] + frame * BINS;
            to[frame] = first[row] + (frame + 1) * 128;
        }
        product(from, to, conv0_weight, conv0_bias, 3 * BINS, 128, FRAMES, 1);
    }
    for (int row = 0; row < rows; row += 2) {
        int pair = rows - row < 2 ? 1 : 2;
        for (int frame = 0; frame < 2 * pair; frame++) {
            from[frame] = first[row + frame / 2] + frame % 2 * 2 * 128;
            to[frame] = second[row + frame / 2] + frame % 2 * 64;
        }
        product(from, to, conv1_weight, conv1_bias, 3 * 128, 64, 2 * pair, 1);
    }
    for (int row = 0; row < rows; row++) from[row] = second[row], to[row] = third[row];
    product(from, to, conv2_weight, conv2_bias, 2 * 64, 64, rows, 1);
    for (int row = 0; row < rows; row++) {
        from[row] = third[row], to[row] = joined[row];
        for (int i = 0; i < WIDTH; i += 4) wasm_v128_store(joined[row] + WIDTH + i, load(mine[row]->h + i));
    }
    product(from, to, conv3_weight, conv3_bias, 64, WIDTH, rows, 1);
    for (int row = 0; row < rows; row++) from[row] = joined[row], to[row] = gates[row];
    product(from, to, lstm_weight, lstm_bias, 2 * WIDTH, 4 * WIDTH, rows, 0);
    for (int row = 0; row < rows; row++) {
        State *state = mine[row];
        v128_t sum = splat(0.0f);
        for (int i = 0; i < WIDTH; i += 4) {
            v128_t in = sigmoid(load(gates[row] + i)), forget = sigmoid(load(gates[row] + WIDTH + i));
            v128_t cell = hyperbolic_tangent(load(gates[row] + 2 * WIDTH + i));
            v128_t out = sigmoid(load(gates[row] + 3 * WIDTH + i));
            v128_t c = add(mul(forget, load(state->c + i)), mul(in, cell));
            v128_t h = mul(out, hyperbolic_tangent(c));
            wasm_v128_store(state->c + i, c);
            wasm_v128_store(state->h + i, h);
            sum = add(sum, mul(wasm_f32x4_pmax(splat(0.0f), h), load(head_weight + i)));
        }
        float total = (wasm_f32x4_extract_lane(sum, 0) + wasm_f32x4_extract_lane(sum, 1)) +
                      (wasm_f32x4_extract_lane(sum, 2) + wasm_f32x4_extract_lane(sum, 3));
        probabilities[begin + row] = wasm_f32x4_extract_lane(sigmoid(splat(total + head_bias[0])), 0);
    }
}

EXPORT(window_samples) uint32_t window_samples(void) { return WINDOW; }
EXPORT(slot_count) uint32_t slot_count(void) { return SLOTS; }
EXPORT(batch_limit) uint32_t batch_limit(void) { return BATCH; }
EXPORT(state_bytes) uint32_t state_bytes(void) { return sizeof(State); }
EXPORT(state_pointer) State *state_pointer(void) { return states; }
EXPORT(input_pointer) int16_t *input_pointer(void) { return &input[0][0]; }
EXPORT(slots_pointer) uint32_t *slots_pointer(void) { return slots; }
EXPORT(probabilities_pointer) float *probabilities_pointer(void) { return probabilities; }

// Makes the state of a slot that of silence before the first sample. Returns 0, or 1 for a slot that does not exist.
EXPORT(reset) int32_t reset(uint32_t slot) {
    if (slot >= SLOTS) return 1;
    float *values = (float *)&states[slot];
    for (uint32_t i = 0; i < sizeof(State) / 4; i += 4) wasm_v128_store(values + i, splat(0.0f));
    return 0;
}

// Steps `count` callers: slots[i] hears input[i], and probabilities[i] is the answer. Returns 0; 1 for more callers
// than BATCH, 2 for a slot that does not exist, 3 for one that is in the batch twice. Then no state has changed.
EXPORT(step) int32_t step(uint32_t count) {
    if (count > BATCH) return 1;
    if (++steps == 0)  // 2^32 steps: marks of the round before would look new
        for (int slot = 0; slot < SLOTS; slot++) seen[slot] = 0, steps = 1;
    for (uint32_t i = 0; i < count; i++) {
        if (slots[i] >= SLOTS) return 2;
        if (seen[slots[i]] == steps) return 3;
        seen[slots[i]] = steps;
    }
    for (uint32_t begin = 0; begin < count; begin += BLOCK)
        step_block(begin, count - begin < BLOCK ? (int)(count - begin) : BLOCK);
    return 0;
}
