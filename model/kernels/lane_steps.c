/* The parts of a decoding step between its linear maps, in float32: norm, SwiGLU, attention of one new column, and
   the sum that lands. Each does in one pass what would be several small tensor operations, whose overhead is larger
   than their work. model/native.py calls them; model/lane_steps.py has the same in torch. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

/* e^x within a few units in the last place; 0 below -87, and above 88 as at 88. A loop over it vectorises. */
static inline float exponential(float exponent) {
    float x = exponent < -87.0f ? -87.0f : exponent > 88.0f ? 88.0f : exponent;
    /* x = n ln 2 + r with |r| <= ln(2) / 2; adding 1.5 * 2^23 rounds to a whole number. */
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return exponent < -87.0f ? 0 : p * power;
}

/* out = x / sqrt(mean of squares + eps) * scale for every row of (lanes, tokens, width); scale is (width) for all
   lanes where scale_lane is 0, or (lanes, width) where it is width. */
void rms_norm(const float *x, const float *scale, float *out, long lanes, long tokens, long width, long scale_lane,
              float eps) {
    for (long row = 0; row < lanes * tokens; row++) {
        const float *in = x + row * width, *s = scale + row / tokens * scale_lane;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < width; i++) sum += in[i] * in[i];
        float factor = 1 / sqrtf(sum / width + eps);
        for (long i = 0; i < width; i++) out[row * width + i] = in[i] * factor * s[i];
    }
}

/* out (rows, width) = silu(gate) * value, where a row of x is [gate; value]. */
void swiglu(const float *x, float *out, long rows, long width) {
    for (long row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * width, *value = gate + width;
        for (long i = 0; i < width; i++) out[row * width + i] = gate[i] / (1 + exponential(-gate[i])) * value[i];
    }
}

/* x_l += own_l + (total - before_l) for every lane; each lane's part is `count` numbers. */
void add_delayed(float *x, const float *own, const float *total, const float *before, long lanes, long count) {
    for (long l = 0; l < lanes; l++)
        for (long i = 0; i < count; i++) x[l * count + i] += own[l * count + i] + (total[i] - before[l * count + i]);
}

/* Turn the neighbouring pairs of x. */
static void rotate(const float *x, const float *cos, const float *sin, float *out, long width, float scale) {
    for (long i = 0; i < width / 2; i++) {
        float even = x[2 * i], odd = x[2 * i + 1];
        out[2 * i] = (even * cos[i] - odd * sin[i]) * scale;
        out[2 * i + 1] = (even * sin[i] + odd * cos[i]) * scale;
    }
}

/* score[m] = q . k[m]; four slots at a time, so that their sums do not wait for each other. */
static void score_slots(const float *q, const float *k, float *score, long held, long width) {
    long m = 0;
    for (; m + 4 <= held; m += 4) {
        const float *k0 = k + m * width, *k1 = k0 + width, *k2 = k1 + width, *k3 = k2 + width;
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (long e = 0; e < width; e++) {
            s0 += q[e] * k0[e];
            s1 += q[e] * k1[e];
            s2 += q[e] * k2[e];
            s3 += q[e] * k3[e];
        }
        score[m] = s0, score[m + 1] = s1, score[m + 2] = s2, score[m + 3] = s3;
    }
    for (; m < held; m++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long e = 0; e < width; e++) sum += q[e] * k[m * width + e];
        score[m] = sum;
    }
}

/* y = sum over m of score[m] * v[m], four slots at a time, so that y is loaded and stored less often. */
static void mix_slots(const float *score, const float *v, float *restrict y, long held, long width) {
    long m = 0;
    memset(y, 0, width * sizeof *y);
    for (; m + 4 <= held; m += 4) {
        const float *v0 = v + m * width, *v1 = v0 + width, *v2 = v1 + width, *v3 = v2 + width;
        float s0 = score[m], s1 = score[m + 1], s2 = score[m + 2], s3 = score[m + 3];
        for (long e = 0; e < width; e++) y[e] += (s0 * v0[e] + s1 * v1[e]) + (s2 * v2[e] + s3 * v3[e]);
    }
    for (; m < held; m++)
        for (long e = 0; e < width; e++) y[e] += score[m] * v[m * width + e];
}

/* One new column. qkv (lanes, batch, [queries, keys, values]); cos and sin (batch, width / 2); keys and values
   (batch, lanes, kv_heads, slots, width), of which `slot` is written and the first `held` are seen; bias (batch, …)
   with bias_row between rows, or NULL, is added to the scores; scores is scratch for (batch, lanes, kv_heads, group,
   held); out (lanes, batch, queries). */
void attend_column(const float *qkv, const float *cos, const float *sin, float *keys, float *values, const float *bias,
                   float *scores, float *out, long lanes, long batch, long kv_heads, long group, long width, long slots,
                   long slot, long held, long bias_row, int threads) {
    long row = (group + 2) * kv_heads * width, count = batch * lanes * kv_heads;
#pragma omp parallel for num_threads(threads)
    for (long item = 0; item < count; item++) {
        long head = item % kv_heads, lane = item / kv_heads % lanes, b = item / kv_heads / lanes;
        const float *in = qkv + (lane * batch + b) * row, *c = cos + b * width / 2, *s = sin + b * width / 2;
        float *k = keys + item * slots * width, *v = values + item * slots * width;
        rotate(in + (group * kv_heads + head) * width, c, s, k + slot * width, width, 1);
        memcpy(v + slot * width, in + ((group + 1) * kv_heads + head) * width, width * sizeof *v);
        for (long g = 0; g < group; g++) {
            float *score = scores + (item * group + g) * held;
            float *y = out + ((lane * batch + b) * kv_heads * group + head * group + g) * width;
            float q[width], largest = -INFINITY, sum = 0;
            rotate(in + (head * group + g) * width, c, s, q, width, 1 / sqrtf(width));
            score_slots(q, k, score, held, width);
            if (bias)
                for (long m = 0; m < held; m++) score[m] += bias[b * bias_row + m];
#pragma omp simd reduction(max : largest)
            for (long m = 0; m < held; m++) largest = score[m] > largest ? score[m] : largest;
#pragma omp simd reduction(+ : sum)
            for (long m = 0; m < held; m++) sum += score[m] = exponential(score[m] - largest);
            mix_slots(score, v, y, held, width);
            for (long e = 0; e < width; e++) y[e] /= sum;
        }
    }
}
