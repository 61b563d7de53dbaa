/* The kernels of low_bit.h. A group's codes stay in registers while every row passes by. */
#include "low_bit.h"

#include "variants.h"

#define SCALES (2 * PANEL) /* bytes of a group's scales, and of its minimums */
#define CODES(bits) (GROUP * PANEL * (bits) / 8) /* bytes of a group's codes */
#define STEP(bits) (CODES(bits) + 2 * SCALES)

static int bits_of(const struct arithmetic *a) { return a->panel_step == STEP(4) ? 4 : 8; }

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

struct group {
    int8_t values[GROUP];
    float scale;
    float sum; /* of the values, times the scale: what a minimum is multiplied with */
};

/* To the nearest of 255 values; the largest of a group is 127 or -127. */
static void round_to_groups(const float *from, void *to, int count)
{
    struct group *out = to;
    for (int k = 0; k < count; k += GROUP, out++) {
        uint32_t present = count - k < GROUP ? (1u << (count - k)) - 1 : ~0u;
        __m512 a = _mm512_maskz_loadu_ps((__mmask16)present, from + k);
        __m512 b = _mm512_maskz_loadu_ps((__mmask16)(present >> 16), from + k + 16);
        float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
        __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        _mm_storeu_si128((__m128i *)out->values, _mm512_cvtsepi32_epi8(low));
        _mm_storeu_si128((__m128i *)(out->values + 16), _mm512_cvtsepi32_epi8(high));
        out->scale = largest / 127.0f;
        out->sum = out->scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    }
}

INLINE __m512i four(const struct group *x, int at)
{
    int32_t values;
    memcpy(&values, x->values + 4 * at, 4);
    return _mm512_set1_epi32(values);
}

INLINE vf halves(const char *at) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE void load_codes(const char *w, const int bits, __m512i codes[GROUP / 4])
{
    if (bits == 8) {
        UNROLL for (int i = 0; i < 8; i++) codes[i] = _mm512_loadu_si512(w + 64 * i);
        return;
    }
    const __m512i lower = _mm512_set1_epi8(15);
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i both = _mm512_loadu_si512(w + 64 * i);
        codes[2 * i] = _mm512_and_si512(both, lower);
        codes[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
    }
}

INLINE void panel_product(const struct product *t, const int panel, const int rows, const int bits)
{
    vf acc[MOST_ROWS];
    FOR_ROWS acc[r] = splat(0.0f);
    const char *base[ROW_GROUPS];
    FOR_ROW_GROUPS base[g] = (const char *)t->x + 3 * g * t->x_stride;
    const char *w = t->panels[panel], *ahead = t->ahead[panel];
    for (int k = 0; k < t->depth; k++) {
        __m512i codes[GROUP / 4];
        load_codes(w, bits, codes);
        vf scale = halves(w + CODES(bits)), minimum = halves(w + CODES(bits) + SCALES);
        UNROLL for (int i = 0; i < STEP(bits); i += 64) __builtin_prefetch(ahead + i, 0, 2);
        FOR_ROWS
        {
            const struct group *x = ROW(struct group, r);
            __m512i even = _mm512_setzero_si512(), odd = even; /* two, since each addition waits for the one before */
            UNROLL for (int i = 0; i < GROUP / 4; i += 2) {
                even = _mm512_dpbusd_epi32(even, codes[i], four(x, i));
                odd = _mm512_dpbusd_epi32(odd, codes[i + 1], four(x, i + 1));
            }
            vf sum = (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
            acc[r] = vfma(sum * splat(x->scale), scale, acc[r]);
            acc[r] = vfma(splat(x->sum), minimum, acc[r]);
        }
        w += STEP(bits);
        ahead += STEP(bits);
        FOR_ROW_GROUPS base[g] += sizeof(struct group);
    }
    float *y = t->y + panel * PANEL;
    FOR_ROWS
    {
        acc[r] *= splat(t->unit);
        if (t->bias) acc[r] += load(t->bias + panel * PANEL);
        store(y, acc[r]);
        y += t->y_stride;
    }
}

INLINE void product_low_bit(const struct product *t, const int rows, const int panels, const int bits)
{
    for (int panel = 0; panel < panels; panel++) panel_product(t, panel, rows, bits);
}

#define product_int4(t, rows, panels) product_low_bit(t, rows, panels, 4)
#define product_int8(t, rows, panels) product_low_bit(t, rows, panels, 8)

FOR_VARIANTS(VARIANT, int4)
FOR_VARIANTS(VARIANT, int8)
static const struct arithmetic int4 = {GROUP, STEP(4), sizeof(struct group), round_to_groups, NULL, NULL,
                                       FOR_VARIANTS(ENTRY, int4)};
static const struct arithmetic int8 = {GROUP, STEP(8), sizeof(struct group), round_to_groups, NULL, NULL,
                                       FOR_VARIANTS(ENTRY, int8)};

const struct arithmetic *low_bit_arithmetic(int bits) { return bits == 4 ? &int4 : &int8; }

#else
const struct arithmetic *low_bit_arithmetic(int bits) { return (void)bits, NULL; }
#endif

/* A column of a group. */
static void put_codes(char *group, int bits, int column, const uint8_t values[GROUP])
{
    for (int i = 0; i < GROUP / 4; i++) {
        uint32_t lower, upper;
        memcpy(&lower, values + 4 * i, 4);
        if (bits == 4) {
            memcpy(&upper, values + 4 * ++i, 4);
            lower |= upper << 4;
        }
        memcpy(group + ((bits == 4 ? i / 2 : i) * PANEL + column) * 4, &lower, 4);
    }
}

static void get_codes(const char *group, int bits, int column, uint8_t values[GROUP])
{
    for (int k = 0; k < GROUP; k++) {
        uint8_t byte = (uint8_t)group[((bits == 4 ? k / 8 : k / 4) * PANEL + column) * 4 + k % 4];
        values[k] = bits == 8 ? byte : k / 4 % 2 ? byte >> 4 : byte & 15;
    }
}

void low_bit_pack(char *panel, const struct arithmetic *a, const struct codes *codes, int first, int columns, int k)
{
    int bits = bits_of(a), size = codes->groups == 1 ? k : k / codes->groups;
    for (int column = 0; column < columns; column++) {
        char *group = panel;
        for (int start = 0; start < k; start += GROUP, group += STEP(bits)) {
            uint8_t values[GROUP] = {0};
            memcpy(values, codes->values + (size_t)(first + column) * k + start, k - start < GROUP ? k - start : GROUP);
            put_codes(group, bits, column, values);
            size_t at = (size_t)(first + column) * codes->groups + start / size;
            memcpy(group + CODES(bits) + 2 * column, codes->scales + at, 2);
            memcpy(group + CODES(bits) + SCALES + 2 * column, codes->minimums + at, 2);
        }
    }
}

static float from_half(const char *at)
{
    uint16_t half;
    memcpy(&half, at, 2);
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    uint32_t bits = (uint32_t)(exponent + 112) << 23 | (uint32_t)mantissa << 13;
    float x;
    memcpy(&x, &bits, 4);
    if (!exponent) x = (float)mantissa * 0x1p-24f;
    return half >> 15 ? -x : x;
}

void low_bit_column(const struct arithmetic *a, const char *panel, int column, float unit, float *out, int k)
{
    int bits = bits_of(a);
    for (int start = 0; start < k; start += GROUP, panel += STEP(bits)) {
        uint8_t values[GROUP];
        get_codes(panel, bits, column, values);
        float scale = from_half(panel + CODES(bits) + 2 * column);
        float minimum = from_half(panel + CODES(bits) + SCALES + 2 * column);
        for (int i = 0; i < GROUP && start + i < k; i++) out[start + i] = ((float)values[i] * scale + minimum) * unit;
    }
}
