/* The kernels of cached_int8.h.
 *
 * Shapes: tiles of 1 to MOST_ROWS rows. Limit: the reading of KV. Attention over 32 contexts of 1,000 tokens is 1.6
 * times as fast as in bfloat16, where the bytes alone allow 1.9 (docs/benchmarks.md, An int8 KV cache on a CPU). */
#include "cached_int8.h"

#include "variants.h"

#define ZERO 128 /* the code of 0 */
#define MOST_CODE 127.0f
#define ROUND_TO_INT 12582912.0f /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
#define ROUND_BITS 0x4b400000 /* its own bits */

/* -- what is stored -------------------------------------------------------------------------------------------- */

static float largest_of(const float *x, int count)
{
    vf largest = splat(0.0f);
    int i = 0;
    for (; i + VL <= count; i += VL) largest = vmax(largest, vmax(load(x + i), -load(x + i)));
    float most = max_of(largest);
    for (; i < count; i++) {
        float size = x[i] < 0.0f ? -x[i] : x[i];
        most = size > most ? size : most;
    }
    return most;
}

/* `count` codes, then the scale. */
static void round_to_codes(const float *from, void *to, int count)
{
    uint8_t *codes = to;
    uint16_t stored = to_bf16(largest_of(from, count) / MOST_CODE);
    float scale = from_bf16(stored);
    memcpy(codes + count, &stored, 2);
    if (!(scale > 0.0f)) {
        memset(codes, ZERO, (size_t)count);
        return;
    }
    for (int i = 0; i < count; i++) {
        float x = from[i] / scale; /* at most 127.25: the scale was rounded */
        x = (x > MOST_CODE ? MOST_CODE : x < -MOST_CODE ? -MOST_CODE : x) + ROUND_TO_INT;
        int32_t bits;
        memcpy(&bits, &x, 4);
        codes[i] = (uint8_t)(bits - ROUND_BITS + ZERO);
    }
}

/* -- widened --------------------------------------------------------------------------------------------------- */

static void keep(const float *from, void *to, int count) { memcpy(to, from, 4 * (size_t)count); }

INLINE vf widen(const char *step, int lane, int i)
{
    vu codes = *(const vu *)(step + lane * sizeof(vu)) >> 8 * i & 255;
    return __builtin_convertvector((vi)codes, vf) - (float)ZERO;
}

INLINE void product_widened(const struct product *t, const int rows, const int panels)
{
    for (int panel = 0; panel < panels; panel++) {
        vf acc[MOST_ROWS][LANES];
        FOR_ROWS UNROLL for (int v = 0; v < LANES; v++) acc[r][v] = splat(0.0f);
        const char *base[ROW_GROUPS];
        FOR_ROW_GROUPS base[g] = (const char *)t->x + 3 * g * t->x_stride;
        for (int s = 0; s < t->segments; s++) {
            const char *w = t->panels[s * panels + panel];
            int depth = s + 1 < t->segments ? t->depth : t->last_depth;
            for (int k = 0; k < depth; k++, w += PANEL * STEP_BYTES) {
                UNROLL for (int i = 0; i < 4; i++) {
                    vf b[LANES];
                    UNROLL for (int v = 0; v < LANES; v++) b[v] = widen(w, v, i);
                    FOR_ROWS
                    {
                        vf a = splat(ROW(float, r)[i]);
                        UNROLL for (int v = 0; v < LANES; v++) acc[r][v] = vfma(a, b[v], acc[r][v]);
                    }
                }
                FOR_ROW_GROUPS base[g] += 4 * sizeof(float);
            }
        }
        float *y = t->y + panel * PANEL;
        FOR_ROWS
        {
            UNROLL for (int v = 0; v < LANES; v++) store(y + v * VL, acc[r][v]);
            y += t->y_stride;
        }
    }
}

FOR_VARIANTS(VARIANT, widened)
static const struct arithmetic widened = {4, PANEL * STEP_BYTES, 4 * sizeof(float), keep, round_to_codes, NULL,
                                          FOR_VARIANTS(ENTRY, widened).has_scales = 1};

const struct arithmetic *cached_int8_widened(void) { return &widened; }

/* -- digits ---------------------------------------------------------------------------------------------------- */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct row { /* value = (256 * high + low) * scale; before its digits, as [k / 4][high, low][4] */
    float scale;
    int32_t high, low; /* where sums start: with what makes codes of zero count for nothing */
    int32_t unused;
};

#define MOST_INTEGER 32639.0f /* 127 * 256 + 127: what two signed digits can say either way */
#define LEAST_NUMBER 1e-30f /* a row with none larger is all zeros: its inverse would be no number */

/* 16 integers as their digits. A 16-bit x has the lower one in its lower byte, and x + 128 the upper in its upper. */
INLINE __m256i digits_of(__m512i integers)
{
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
    __m256i x = _mm512_cvtepi32_epi16(integers), shifted = _mm256_add_epi16(x, _mm256_set1_epi16(128));
    return _mm256_shuffle_epi8(_mm256_mask_blend_epi8(0xaaaaaaaa, x, shifted), order);
}

static void round_to_digits(const float *from, void *to, int count)
{
    struct row *row = to;
    char *steps = (char *)(row + 1);
    float largest = largest_of(from, count);
    int is_zero = !(largest > LEAST_NUMBER);
    __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : MOST_INTEGER / largest);
    __m256i sums = _mm256_setzero_si256(), ones = _mm256_set1_epi8(1); /* of upper and lower digits in turn */
    for (int k = 0; k < count; k += 16, steps += 32) {
        __mmask16 present = count - k < 16 ? (__mmask16)((1u << (count - k)) - 1) : (__mmask16)~0u;
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(present, from + k), inverse);
        __m256i digits = digits_of(_mm512_cvtps_epi32(x));
        sums = _mm256_dpbusd_epi32(sums, ones, digits);
        if (count - k > 8) _mm256_storeu_si256((__m256i *)steps, digits);
        else _mm_storeu_si128((__m128i *)steps, _mm256_castsi256_si128(digits));
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    row->scale = is_zero ? 0.0f : largest / MOST_INTEGER;
    row->high = -ZERO * (_mm_extract_epi32(four, 0) + _mm_extract_epi32(four, 2));
    row->low = -ZERO * (_mm_extract_epi32(four, 1) + _mm_extract_epi32(four, 3));
}

INLINE __m512i four(const char *digits)
{
    int32_t values;
    memcpy(&values, digits, 4);
    return _mm512_set1_epi32(values);
}

#define FOR_WIDTH UNROLL for (int p = 0; p < width; p++)

/* `width` panels from `first`. */
INLINE void digit_panels(const struct product *t, const int rows, const int panels, const int first, const int width)
{
    __m512i high[MOST_ROWS][MOST_PANELS], low[MOST_ROWS][MOST_PANELS];
    const char *base[ROW_GROUPS];
    FOR_ROW_GROUPS base[g] = (const char *)t->x + 3 * g * t->x_stride;
    FOR_ROWS FOR_WIDTH
    {
        high[r][p] = _mm512_set1_epi32(ROW(struct row, r)->high);
        low[r][p] = _mm512_set1_epi32(ROW(struct row, r)->low);
    }
    FOR_ROW_GROUPS base[g] += sizeof(struct row);
    int s = 0;
    do {
        const char *w[MOST_PANELS], *ahead[MOST_PANELS];
        FOR_WIDTH w[p] = t->panels[s * panels + first + p];
        FOR_WIDTH ahead[p] = t->ahead[s * panels + first + p];
        int depth = s + 1 < t->segments ? t->depth : t->last_depth;
        for (int k = 0; k < depth; k++) {
            __m512i codes[MOST_PANELS];
            FOR_WIDTH codes[p] = _mm512_loadu_si512(w[p]);
            FOR_ROWS
            {
                __m512i h = four(ROW(char, r)), l = four(ROW(char, r) + 4);
                FOR_WIDTH high[r][p] = _mm512_dpbusd_epi32(high[r][p], codes[p], h);
                FOR_WIDTH low[r][p] = _mm512_dpbusd_epi32(low[r][p], codes[p], l);
            }
            FOR_WIDTH
            {
                __builtin_prefetch(ahead[p], 0, 2);
                ahead[p] += PANEL * STEP_BYTES;
                w[p] += PANEL * STEP_BYTES;
            }
            FOR_ROW_GROUPS base[g] += 8;
        }
        /* Or GCC computes ahead what the last segment leaves, and has no registers for it. */
        FOR_ROWS FOR_WIDTH __asm__("" : "+v"(high[r][p]), "+v"(low[r][p]));
    } while (++s < t->segments);
    float *y = t->y + first * PANEL;
    const char *x = t->x;
    FOR_ROWS
    {
        vf scale = splat(((const struct row *)x)->scale);
        FOR_WIDTH
        {
            vf sum = vfma((vf)_mm512_cvtepi32_ps(high[r][p]), splat(256.0f), (vf)_mm512_cvtepi32_ps(low[r][p]));
            store(y + p * PANEL, sum * scale);
        }
        x += t->x_stride;
        y += t->y_stride;
    }
}

/* Few rows take two panels at once: a sum waits for the one before it. Many would not fit into the registers. */
INLINE void product_digits(const struct product *t, const int rows, const int panels)
{
    const int width = rows * panels <= MOST_ROWS ? panels : 1;
    for (int first = 0; first < panels; first += width) digit_panels(t, rows, panels, first, width);
}

FOR_VARIANTS(VARIANT, digits)
static const struct arithmetic digits = {4, PANEL * STEP_BYTES, 8, round_to_digits, round_to_codes, NULL,
                                         FOR_VARIANTS(ENTRY, digits).has_scales = 1, .row_head = sizeof(struct row)};

const struct arithmetic *cached_int8_digits(void) { return &digits; }

#else
const struct arithmetic *cached_int8_digits(void) { return NULL; }
#endif
