/* The kernels of low_bit.h. A group's codes stay in registers while every row passes by. */
#include "low_bit.h"

#include "variants.h"

#include <float.h>

#define SCALES (2 * PANEL) /* bytes of a group's scales, and of its minimums */
#define CODES(bits) (GROUP * PANEL * (bits) / 8) /* bytes of a step's codes */

/* Of one step of a panel. */
struct layout {
    int bits;
    int groups;
    int minimums; /* whether there are any */
};

static const struct layout layouts[] = {
    [INT4] = {4, 1, 1}, [INT8] = {8, 1, 1}, [INT4_CENTRED] = {4, 1, 0}, [INT8_CENTRED] = {8, 1, 0},
    [INT8_FINE] = {8, 2, 1},
};

#define MIDDLE(f) (1 << ((f).bits - 1))
#define STEP(f) (CODES((f).bits) + SCALES * (f).groups * (1 + (f).minimums))

/* No two layouts have steps of one size. */
static struct layout layout_of(const struct arithmetic *a)
{
    int kind = INT4;
    while (STEP(layouts[kind]) != a->panel_step) kind++;
    return layouts[kind];
}

static const char *scales_at(const char *step, struct layout f, int group)
{
    return step + CODES(f.bits) + group * SCALES;
}

static const char *minimums_at(const char *step, struct layout f, int group)
{
    return scales_at(step, f, f.groups + group);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

#define QUADS (GROUP / 4)
#define QUAD_BYTES (4 * PANEL) /* of the codes that a quad meets, one to a byte */
#define WIDE_BYTES (QUADS * QUAD_BYTES)
/* Bits of the first digit where there is a second. Codes of 4 bits leave room in their bytes to be shifted by 4. */
#define DIGIT(bits) ((bits) == 4 ? 4 : 7)

struct group {
    int8_t values[GROUP]; /* of the wide quad: first digits */
    int8_t seconds[4];
    int32_t wide; /* which quad that is: the bytes before its codes */
    float scale;
    float sum, first; /* of the values, and of the first half, times the scale: what a minimum is multiplied with */
    int32_t centre; /* the sum, without the scale, times what the codes count from, less than nothing */
};

/* Of four vectors, quad by quad: in lane l, value i is `fold` of the four values in lane l of vector i. */
#define FOLD(name, fold)                                                                        \
    INLINE __m512i name##_of_quads(const __m512i x[4])                                          \
    {                                                                                           \
        __m512i a = fold(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1])); \
        __m512i b = fold(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3])); \
        return fold(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));                  \
    }                                                                                           \
    INLINE __m128i name##_of_lanes(__m512i x)                                                   \
    {                                                                                           \
        x = fold(x, _mm512_shuffle_i32x4(x, x, 0xb1));                                          \
        return _mm512_castsi512_si128(fold(x, _mm512_shuffle_i32x4(x, x, 0x4e)));               \
    }

FOLD(largest, _mm512_max_epi32)
FOLD(sum, _mm512_add_epi32)

/* The largest of a group's eight keys, two groups side by side. */
INLINE __m128i largest_of_groups(__m512i keys)
{
    return largest_of_lanes(_mm512_max_epi32(keys, _mm512_shuffle_epi32(keys, 0xb1)));
}

/* Two groups, of which the first `groups` are kept, to the nearest multiples of their scales. The quad with a group's
 * largest magnitude becomes wide, and of the others the largest is 127 or -127. Magnitudes are compared as integers,
 * which floats above zero allow, with the quad's number for their last bits. */
INLINE void round_two(const __m512 x[4], struct group *out, const int groups, const int bits)
{
    const __m512i numbers = _mm512_set_epi32(7, 3, 7, 3, 6, 2, 6, 2, 5, 1, 5, 1, 4, 0, 4, 0);
    const __m512i nearest = _mm512_set1_epi32(1 << (DIGIT(bits) - 1));
    __m512i v[4];
    UNROLL for (int i = 0; i < 4; i++) v[i] = _mm512_castps_si512(_mm512_abs_ps(x[i]));
    __m512i keys = _mm512_ternarylogic_epi32(largest_of_quads(v), numbers, _mm512_set1_epi32(QUADS - 1), 0xd8);
    __m128i top = largest_of_groups(keys);
    __m128i rest = largest_of_groups(_mm512_maskz_mov_epi32(_mm512_cmpneq_epi32_mask(keys, _mm512_broadcast_i32x4(top)), keys));
    __m128 scale = _mm_max_ps(_mm_mul_ps(_mm_castsi128_ps(rest), _mm_set1_ps(1.0f / 127)),
                              _mm_mul_ps(_mm_castsi128_ps(top), _mm_set1_ps(1.0f / (127 << DIGIT(bits)))));
    __m128 inverse = _mm_and_ps(_mm_div_ps(_mm_set1_ps(1.0f), scale), _mm_cmpge_ps(scale, _mm_set1_ps(FLT_MIN)));
    __m512 inverses = _mm512_broadcast_f32x4(inverse);
    UNROLL for (int i = 0; i < 4; i++)
        v[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_permute_ps(inverses, i < 2 ? 0x00 : 0xaa)));
    int32_t wide[4], sums[4];
    float scales[4];
    _mm_storeu_si128((__m128i *)wide, _mm_and_si128(top, _mm_set1_epi32(QUADS - 1)));
    _mm_storeu_si128((__m128i *)sums, sum_of_lanes(sum_of_quads(v)));
    _mm_storeu_ps(scales, scale);
    UNROLL for (int g = 0; g < groups; g++, out++) {
        int quad = wide[2 * g], first = sums[2 * g], sum = first + sums[2 * g + 1];
        int8_t seconds[GROUP];
        UNROLL for (int half = 0; half < 2; half++) {
            __mmask16 in_quad = (__mmask16)(15u << 4 * quad >> 16 * half);
            __m512i whole = v[2 * g + half];
            __m512i second = _mm512_maskz_srai_epi32(in_quad, _mm512_add_epi32(whole, nearest), DIGIT(bits));
            __m512i value = _mm512_sub_epi32(whole, _mm512_slli_epi32(second, DIGIT(bits)));
            _mm_storeu_si128((__m128i *)(seconds + 16 * half), _mm512_cvtepi32_epi8(second));
            _mm_storeu_si128((__m128i *)(out->values + 16 * half), _mm512_cvtepi32_epi8(value));
        }
        memcpy(out->seconds, seconds + 4 * quad, 4);
        out->wide = QUAD_BYTES * quad;
        out->scale = scales[2 * g];
        out->sum = out->scale * (float)sum;
        out->first = out->scale * (float)first;
        out->centre = -(1 << (bits - 1)) * sum;
    }
}

INLINE void round_to_groups(const float *from, struct group *out, int count, const int bits)
{
    for (; count > 0; count -= 2 * GROUP, from += 2 * GROUP, out += 2) {
        uint64_t present = count < 2 * GROUP ? (1ull << count) - 1 : ~0ull;
        __m512 x[4];
        UNROLL for (int i = 0; i < 4; i++) x[i] = _mm512_maskz_loadu_ps((__mmask16)(present >> 16 * i), from + 16 * i);
        if (count > GROUP) round_two(x, out, 2, bits);
        else round_two(x, out, 1, bits);
    }
}

static void round_for_int4(const float *from, void *to, int count) { round_to_groups(from, to, count, 4); }
static void round_for_int8(const float *from, void *to, int count) { round_to_groups(from, to, count, 8); }

INLINE __m512i splat_four(const int8_t *values)
{
    int32_t four;
    memcpy(&four, values, 4);
    return _mm512_set1_epi32(four);
}

INLINE vf halves(const char *at) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE void load_codes(const char *w, const int bits, __m512i codes[QUADS])
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

/* Second digits times their codes, added to `start`. The codes of 4 bits are shifted already. */
INLINE __m512i add_seconds(__m512i start, const struct group *x, const char *wide, const int bits)
{
    __m512i codes = _mm512_loadu_si512(wide + x->wide), four = splat_four(x->seconds);
    if (bits == 4) return _mm512_dpbusd_epi32(start, codes, four);
    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, four);
    return _mm512_add_epi32(start, _mm512_slli_epi32(sum, DIGIT(8)));
}

/* One step of a few rows, quad by quad in turns: a product waits for the one before it in its row. */
INLINE void step_product(const struct group *const *x, vf *acc, const int rows, const __m512i codes[QUADS],
                         const vf scales[2], const vf minimums[2], const char *wide, const struct layout f)
{
    const __m512i zero = _mm512_setzero_si512();
    __m512i sums[2][MOST_ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        __m512i start = f.minimums ? zero : _mm512_set1_epi32(x[r]->centre);
        sums[0][r] = add_seconds(start, x[r], wide, f.bits);
        if (f.groups == 2) {
            int is_second = x[r]->wide >= WIDE_BYTES / 2;
            sums[1][r] = is_second ? sums[0][r] : zero;
            if (is_second) sums[0][r] = zero;
        }
    }
    UNROLL for (int i = 0; i < QUADS; i++)
        UNROLL for (int r = 0; r < rows; r++) {
            __m512i *sum = &sums[f.groups == 2 && i >= QUADS / 2][r];
            *sum = _mm512_dpbusd_epi32(*sum, codes[i], splat_four(x[r]->values + 4 * i));
        }
    UNROLL for (int g = 0; g < f.groups; g++)
        UNROLL for (int r = 0; r < rows; r++) {
            acc[r] = vfma((vf)_mm512_cvtepi32_ps(sums[g][r]) * splat(x[r]->scale), scales[g], acc[r]);
            float part = f.groups == 1 ? x[r]->sum : g ? x[r]->sum - x[r]->first : x[r]->first;
            if (f.minimums) acc[r] = vfma(splat(part), minimums[g], acc[r]);
        }
}

INLINE void panel_product(const struct product *t, const int panel, const int rows, const int panels,
                          const struct layout f)
{
    const int batch = rows <= 8 ? rows : 6; /* as many sums as there are registers for */
    vf acc[MOST_ROWS];
    FOR_ROWS acc[r] = splat(0.0f);
    const char *base[ROW_GROUPS];
    FOR_ROW_GROUPS base[g] = (const char *)t->x + 3 * g * t->x_stride;
    const char *w = t->panels[panel], *ahead = NULL;
    for (int k = 0, run = 0, left = 0; k < t->depth; k++, left--) {
        if (!left) {
            ahead = t->ahead[run++ * panels + panel];
            left = t->ahead_steps;
        }
        __m512i codes[QUADS];
        load_codes(w, f.bits, codes);
        char shifted[WIDE_BYTES] __attribute__((aligned(64)));
        if (f.bits == 4)
            UNROLL for (int i = 0; i < QUADS; i++)
                _mm512_store_si512(shifted + QUAD_BYTES * i, _mm512_slli_epi16(codes[i], DIGIT(4)));
        vf scales[2], minimums[2];
        UNROLL for (int g = 0; g < f.groups; g++) {
            scales[g] = halves(scales_at(w, f, g));
            if (f.minimums) minimums[g] = halves(minimums_at(w, f, g));
        }
        UNROLL for (int i = 0; i < STEP(f); i += 64) __builtin_prefetch(ahead + i, 0, 2);
        const struct group *x[MOST_ROWS];
        FOR_ROWS x[r] = ROW(struct group, r);
        UNROLL for (int r = 0; r < rows; r += batch)
            step_product(x + r, acc + r, rows - r < batch ? rows - r : batch, codes, scales, minimums,
                         f.bits == 4 ? shifted : w, f);
        w += STEP(f);
        ahead += STEP(f);
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

INLINE void product_low_bit(const struct product *t, const int rows, const int panels, const struct layout f)
{
    for (int panel = 0; panel < panels; panel++) panel_product(t, panel, rows, panels, f);
}

#define product_int4(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){4, 1, 1})
#define product_int8(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){8, 1, 1})
#define product_int4_centred(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){4, 1, 0})
#define product_int8_centred(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){8, 1, 0})
#define product_int8_fine(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){8, 2, 1})

FOR_VARIANTS(VARIANT, int4)
FOR_VARIANTS(VARIANT, int8)
FOR_VARIANTS(VARIANT, int4_centred)
FOR_VARIANTS(VARIANT, int8_centred)
FOR_VARIANTS(VARIANT, int8_fine)

#define ARITHMETIC(kind, bits, name) \
    [kind] = {GROUP, STEP(layouts[kind]), sizeof(struct group), round_for_int##bits, NULL, NULL, FOR_VARIANTS(ENTRY, name)}

const struct arithmetic *low_bit_arithmetic(enum low_bit kind)
{
    static const struct arithmetic all[] = {
        ARITHMETIC(INT4, 4, int4),
        ARITHMETIC(INT8, 8, int8),
        ARITHMETIC(INT4_CENTRED, 4, int4_centred),
        ARITHMETIC(INT8_CENTRED, 8, int8_centred),
        ARITHMETIC(INT8_FINE, 8, int8_fine),
    };
    return all + kind;
}

#else
const struct arithmetic *low_bit_arithmetic(enum low_bit kind) { return (void)kind, NULL; }
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
    struct layout f = layout_of(a);
    int size = codes->groups == 1 ? k : k / codes->groups;
    for (int column = 0; column < columns; column++) {
        char *step = panel;
        for (int start = 0; start < k; start += GROUP, step += STEP(f)) {
            uint8_t values[GROUP] = {0};
            memcpy(values, codes->values + (size_t)(first + column) * k + start, k - start < GROUP ? k - start : GROUP);
            put_codes(step, f.bits, column, values);
            for (int group = 0; group < f.groups && start + group * GROUP / f.groups < k; group++) {
                size_t at = (size_t)(first + column) * codes->groups + (start + group * GROUP / f.groups) / size;
                memcpy((char *)scales_at(step, f, group) + 2 * column, codes->scales + at, 2);
                if (f.minimums) memcpy((char *)minimums_at(step, f, group) + 2 * column, codes->minimums + at, 2);
            }
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
    struct layout f = layout_of(a);
    for (int start = 0; start < k; start += GROUP, panel += STEP(f)) {
        uint8_t values[GROUP];
        get_codes(panel, f.bits, column, values);
        for (int group = 0, size = GROUP / f.groups; group < f.groups; group++) {
            float scale = from_half(scales_at(panel, f, group) + 2 * column);
            float minimum = f.minimums ? from_half(minimums_at(panel, f, group) + 2 * column) : 0.0f;
            for (int i = group * size; i < (group + 1) * size && start + i < k; i++)
                out[start + i] = ((float)(values[i] - (f.minimums ? 0 : MIDDLE(f))) * scale + minimum) * unit;
        }
    }
}
