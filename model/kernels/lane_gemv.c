/* Matrix times few vectors, per lane, for weights stored in float32, bfloat16 or int8:

       y[l][t][o] = scale[l][o] * sum over i of w[l][o][i] * x[l][t][i]        (without scale: 1)

   Weights are widened to float32 in registers; x, y, scale and all sums are float32. With few vectors the time is
   that of reading the weights once. Two things make that read fast:
   - A thread walks four rows that lie a quarter of the lane's matrix apart, so that the hardware prefetcher has
     four streams under way. On the machine this was tuned on (AMD Zen 4), four neighbouring rows got half of it.
   - All vectors of the call use a row while it lies in the cache.
   A row's sum is taken in the same order whatever the number of vectors, lanes and threads.

   model/weights.py compiles this file for the machine at hand and is its only caller. */

#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum kind { FLOAT32, BFLOAT16, INT8 };

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include <immintrin.h>
typedef __m512 floats;
enum { WIDTH = 16, MOST_VECTORS = 4 };

INLINE floats widen(enum kind kind, const void *w, long i) {
    switch (kind) {
    case FLOAT32:
        return _mm512_loadu_ps((const float *)w + i);
    case BFLOAT16: {
        __m256i half = _mm256_loadu_si256((const void *)((const uint16_t *)w + i));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    default:
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)((const int8_t *)w + i))));
    }
}

#elif defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>
typedef __m256 floats;
enum { WIDTH = 8, MOST_VECTORS = 2 }; /* 16 registers */

INLINE floats widen(enum kind kind, const void *w, long i) {
    switch (kind) {
    case FLOAT32:
        return _mm256_loadu_ps((const float *)w + i);
    case BFLOAT16: {
        __m128i half = _mm_loadu_si128((const void *)((const uint16_t *)w + i));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    default:
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)((const int8_t *)w + i))));
    }
}

#else

enum { WIDTH = 4, MOST_VECTORS = 4 };
typedef float floats __attribute__((vector_size(4 * WIDTH)));

#define GENERIC
#endif

/* One weight as float32. */
INLINE float weight(enum kind kind, const void *w, long i) {
    switch (kind) {
    case FLOAT32:
        return ((const float *)w)[i];
    case BFLOAT16: {
        uint32_t bits = (uint32_t)((const uint16_t *)w)[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    default:
        return ((const int8_t *)w)[i];
    }
}

#ifdef GENERIC
INLINE floats widen(enum kind kind, const void *w, long i) {
    floats v;
    UNROLL for (int k = 0; k < WIDTH; k++) v[k] = weight(kind, w, i + k);
    return v;
}
#endif

INLINE float total(floats v) {
    float parts[WIDTH];
    memcpy(parts, &v, sizeof parts);
    UNROLL for (int half = WIDTH / 2; half > 0; half /= 2) UNROLL for (int k = 0; k < half; k++) parts[k] += parts[k + half];
    return parts[0];
}

/* A lane's call. Strides count elements. */
struct lane {
    const void *w;
    const float *scale, *x; /* scale may be NULL */
    float *y;
    long inputs, x_stride, y_stride;
};

/* Add the inputs from i on, which fill no register, scale and store. */
static void finish(enum kind kind, int rows, int vectors, const struct lane *a, long o, long step, long t, long i,
                   float y[4][4]) {
    for (int r = 0; r < rows; r++) {
        long row = o + r * step;
        for (int v = 0; v < vectors; v++) {
            const float *x = a->x + (t + v) * a->x_stride;
            for (long j = i; j < a->inputs; j++) y[r][v] += weight(kind, a->w, row * a->inputs + j) * x[j];
            a->y[(t + v) * a->y_stride + row] = a->scale ? y[r][v] * a->scale[row] : y[r][v];
        }
    }
}

/* Rows o, o + step, … with vectors t, t + 1, …; kind, rows and vectors are constants to the compiler. */
INLINE void dots(enum kind kind, int rows, int vectors, const struct lane *a, long o, long step, long t) {
    floats sum[4][4];
    const float *x = a->x + t * a->x_stride;
    long i = 0;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = (floats){0};
    for (; i + WIDTH <= a->inputs; i += WIDTH) {
        floats in[4];
        UNROLL for (int v = 0; v < vectors; v++) in[v] = widen(FLOAT32, x + v * a->x_stride, i);
        UNROLL for (int r = 0; r < rows; r++) {
            floats w = widen(kind, a->w, (o + r * step) * a->inputs + i);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] += w * in[v];
        }
    }
    float y[4][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) y[r][v] = total(sum[r][v]);
    finish(kind, rows, vectors, a, o, step, t, i, y);
}

INLINE void all_vectors(enum kind kind, int rows, const struct lane *a, long o, long step, long vectors) {
    long t = 0;
    for (; rows > 1 && t + MOST_VECTORS <= vectors; t += MOST_VECTORS) dots(kind, rows, MOST_VECTORS, a, o, step, t);
    for (; rows > 1 && t + 2 <= vectors; t += 2) dots(kind, rows, 2, a, o, step, t);
    for (; t < vectors; t++) dots(kind, rows, 1, a, o, step, t);
}

/* Thread k of n: its share of every quarter of the rows; the last thread also those that four does not divide. */
INLINE void share(enum kind kind, const struct lane *a, long outputs, long vectors, int k, int n) {
    long quarter = outputs / 4;
    for (long o = quarter * k / n; o < quarter * (k + 1) / n; o++) all_vectors(kind, 4, a, o, quarter, vectors);
    if (k == n - 1)
        for (long o = 4 * quarter; o < outputs; o++) all_vectors(kind, 1, a, o, 0, vectors);
}

/* w is (lanes, outputs, inputs) and scale (lanes, outputs), both contiguous. x and y have strides, in elements,
   for lanes and vectors, and contiguous inputs and outputs. */
void lane_gemv(enum kind kind, const void *w, const float *scale, const float *x, float *y, long lanes, long vectors,
               long outputs, long inputs, long x_lane, long x_vector, long y_lane, long y_vector, int threads) {
    static const long bytes[] = {4, 2, 1};
#pragma omp parallel num_threads(threads)
    for (long l = 0; l < lanes; l++) {
        int k = omp_get_thread_num(), n = omp_get_num_threads();
        struct lane a = {.w = (const char *)w + l * outputs * inputs * bytes[kind],
                         .scale = scale ? scale + l * outputs : 0,
                         .x = x + l * x_lane,
                         .y = y + l * y_lane,
                         .inputs = inputs,
                         .x_stride = x_vector,
                         .y_stride = y_vector};
        switch (kind) {
        case FLOAT32:
            share(FLOAT32, &a, outputs, vectors, k, n);
            break;
        case BFLOAT16:
            share(BFLOAT16, &a, outputs, vectors, k, n);
            break;
        default:
            share(INT8, &a, outputs, vectors, k, n);
        }
    }
}
