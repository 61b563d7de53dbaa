/* The kernels of product.h: one text per arithmetic, compiled for every number of rows and panels.
 *
 * Shapes: 1 to MOST_ROWS rows by 1 to MOST_PANELS panels. Limit: with a few rows the reading of panels, with many the
 * arithmetic, 0.23 TFLOP/s in float32 and 0.46 in bfloat16 pairs on two cores of a Zen 4 (docs/benchmarks.md). The
 * share that is reached was not measured by itself. */
#include "cached_int8.h"
#include "low_bit.h"
#include "variants.h"

#define FOR_VECTORS UNROLL for (int v = 0; v < panels * LANES; v++)

INLINE void write_out(const struct product *t, vf acc[MOST_ROWS][MOST_PANELS * LANES], const int rows, const int panels)
{
    const float *bias = t->bias;
    float *y = t->y;
    if (bias) FOR_ROWS FOR_VECTORS acc[r][v] += load(bias + v * VL);
    FOR_ROWS
    {
        FOR_VECTORS store(y + v * VL, acc[r][v]);
        y += t->y_stride;
    }
}

/* The loop over segments and steps around one step's arithmetic; `step_bytes` is what a row advances in one step. */
#define PRODUCT(step_bytes, STEP)                                                                  \
    vf acc[MOST_ROWS][MOST_PANELS * LANES];                                                        \
    FOR_ROWS FOR_VECTORS acc[r][v] = splat(0.0f);                                                  \
    const char *base[ROW_GROUPS];                                                                  \
    FOR_ROW_GROUPS base[g] = (const char *)t->x + 3 * g * t->x_stride;                              \
    for (int s = 0; s < t->segments; s++) {                                                        \
        const char *w[MOST_PANELS];                                                                \
        UNROLL for (int p = 0; p < panels; p++) w[p] = t->panels[s * panels + p];                  \
        const char *ahead[MOST_PANELS];                                                            \
        UNROLL for (int p = 0; p < panels; p++) ahead[p] = t->ahead[s * panels + p];               \
        int depth = s + 1 < t->segments ? t->depth : t->last_depth;                                \
        for (int k = 0; k < depth; k++) {                                                          \
            STEP                                                                                   \
            UNROLL for (int p = 0; p < panels; p++) {                                              \
                __builtin_prefetch(ahead[p], 0, 2);                                                \
                ahead[p] += 4 * PANEL;                                                             \
                w[p] += 4 * PANEL;                                                                 \
            }                                                                                      \
            FOR_ROW_GROUPS base[g] += step_bytes;                                                  \
        }                                                                                          \
    }                                                                                              \
    write_out(t, acc, rows, panels);

#define WEIGHTS(type, v) (*(const type *)(w[(v) / LANES] + (v) % LANES * sizeof(type)))

INLINE void product_float32(const struct product *t, const int rows, const int panels)
{
    PRODUCT(4, {
        vf b[MOST_PANELS * LANES];
        FOR_VECTORS b[v] = WEIGHTS(vf, v);
        FOR_ROWS
        {
            vf a = splat(*ROW(float, r));
            FOR_VECTORS acc[r][v] = vfma(a, b[v], acc[r][v]);
        }
    })
}

/* Weights are bfloat16, widened exactly; rows and sums are float32. */
INLINE void product_bfloat16(const struct product *t, const int rows, const int panels)
{
    PRODUCT(8, {
        vf even[MOST_PANELS * LANES];
        vf odd[MOST_PANELS * LANES];
        FOR_VECTORS even[v] = (vf)(WEIGHTS(vu, v) << 16);
        FOR_VECTORS odd[v] = (vf)(WEIGHTS(vu, v) & 0xffff0000u);
        FOR_ROWS
        {
            vf a = splat(ROW(float, r)[0]);
            FOR_VECTORS acc[r][v] = vfma(a, even[v], acc[r][v]);
            a = splat(ROW(float, r)[1]);
            FOR_VECTORS acc[r][v] = vfma(a, odd[v], acc[r][v]);
        }
    })
}

#if defined(__AVX512BF16__)
/* Rows are rounded to bfloat16 too; the instruction multiplies pairs and adds them to a float32 sum. */
INLINE void product_bfloat16_dot(const struct product *t, const int rows, const int panels)
{
    PRODUCT(4, {
        __m512bh b[MOST_PANELS * LANES];
        FOR_VECTORS b[v] = (__m512bh)_mm512_loadu_si512(w[v]);
        FOR_ROWS
        {
            __m512bh a = (__m512bh)_mm512_set1_epi32(*ROW(int, r));
            FOR_VECTORS acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], a, b[v]);
        }
    })
}
#endif

static void keep_float32(const float *from, void *to, int count) { memcpy(to, from, 4 * (size_t)count); }

static void read_float32(const void *from, float *to, int count) { memcpy(to, from, 4 * (size_t)count); }

static void round_to_bfloat16(const float *from, void *to, int count)
{
    uint16_t *out = to;
    int i = 0;
#if defined(__AVX512BF16__)
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#endif
    for (; i < count; i++) out[i] = to_bf16(from[i]);
}

static void widen_bfloat16(const void *from, float *to, int count)
{
    const uint16_t *in = from;
    for (int i = 0; i < count; i++) to[i] = from_bf16(in[i]);
}

FOR_VARIANTS(VARIANT, float32)
static const struct arithmetic float32 = {1, 4 * PANEL, 4, keep_float32, keep_float32, read_float32,
                                          FOR_VARIANTS(ENTRY, float32)};

FOR_VARIANTS(VARIANT, bfloat16)
static const struct arithmetic bfloat16 = {2, 4 * PANEL, 8, keep_float32, round_to_bfloat16, widen_bfloat16,
                                           FOR_VARIANTS(ENTRY, bfloat16)};

#if defined(__AVX512BF16__)
FOR_VARIANTS(VARIANT, bfloat16_dot)
static const struct arithmetic bfloat16_dot = {2, 4 * PANEL, 4, round_to_bfloat16, round_to_bfloat16, widen_bfloat16,
                                               FOR_VARIANTS(ENTRY, bfloat16_dot)};
#endif

const struct arithmetic *arithmetic_at(int index)
{
    const struct arithmetic *const all[] = {
        &float32,
        &bfloat16,
#if defined(__AVX512BF16__)
        &bfloat16_dot,
#else
        NULL,
#endif
        low_bit_arithmetic(INT4),
        low_bit_arithmetic(INT8),
        cached_int8_digits(),
        cached_int8_widened(),
        low_bit_arithmetic(INT4_CENTRED),
        low_bit_arithmetic(INT8_CENTRED),
        low_bit_arithmetic(INT8_FINE),
        low_bit_arithmetic(MXFP4),
    };
    return index < (int)(sizeof all / sizeof *all) ? all[index] : NULL;
}
