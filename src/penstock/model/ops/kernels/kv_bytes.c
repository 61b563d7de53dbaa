/* Bytes of KV blocks on their way between processes: copied from one cache to another, and hashed.
 *
 * Shapes: any number of parts (a layer's keys, its values), each with blocks of one size. Limit: memory for the copy,
 * arithmetic for the hash. Copies go part by part, so that blocks which follow each other are read as one stream.
 * Reference: the same loop over memoryviews, and CRC-32, in transfer/host_memory.py. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64

/* Past the caches, where nobody reads soon what is written. */
static void stream(char *to, const char *from, size_t size)
{
#ifdef __SSE2__
    if ((uintptr_t)to % LINE == 0 && size % LINE == 0) {
        for (size_t at = 0; at < size; at += LINE)
            for (size_t i = 0; i < LINE; i += sizeof(__m128i))
                _mm_stream_si128((__m128i *)(to + at + i), _mm_loadu_si128((const __m128i *)(from + at + i)));
        return;
    }
#endif
    memcpy(to, from, size);
}

void kv_copy(char *const *to, const int64_t *to_ids, const char *const *from, const int64_t *from_ids,
             const int64_t *sizes, int64_t parts, int64_t count)
{
    for (int64_t p = 0; p < parts; p++)
        for (int64_t i = 0; i < count; i++)
            stream(to[p] + to_ids[i] * sizes[p], from[p] + from_ids[i] * sizes[p], sizes[p]);
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* A checksum in the way of XXH3, at the speed of memory: words are added up in lanes, each with the product of its
 * halves under a key of its place, and after every block of stripes all that was added is multiplied. Whatever changes
 * within four bytes is noticed, other damage but for one case in 2^64. It is no signature. Words are in the byte order
 * of this machine. */
#define LANES 8
#define STRIPE (LANES * sizeof(uint64_t))
#define STRIPES 16
#define PRIME_1 0x9E3779B185EBCA87u
#define PRIME_2 0xC2B2AE3D27D4EB4Fu
#define PRIME_3 0x165667B19E3779F9u

typedef uint64_t lanes __attribute__((vector_size(LANES * sizeof(uint64_t))));

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 33) * PRIME_2;
    x = (x ^ x >> 29) * PRIME_3;
    return x ^ x >> 32;
}

static inline void read_lanes(lanes *x, const void *p) { memcpy(x, p, sizeof *x); }

static inline void add_stripe(lanes *sums, const void *p, const uint64_t *key)
{
    lanes words, keyed;
    read_lanes(&words, p);
    read_lanes(&keyed, key);
    keyed ^= words;
    *sums += words + (keyed & 0xFFFFFFFFu) * (keyed >> 32);
}

struct hash {
    lanes sums;
    uint64_t key[STRIPES + LANES];
    int stripes; /* since sums were multiplied */
};

static void multiply(struct hash *h)
{
    lanes last_key;
    read_lanes(&last_key, h->key + STRIPES);
    h->sums = (h->sums ^ h->sums >> 47 ^ last_key) * PRIME_1;
    h->stripes = 0;
}

/* A piece counts as if it ended with zeros up to a whole stripe. */
static void add_piece(struct hash *h, const char *p, size_t size)
{
    while (size >= STRIPE) {
        size_t whole = size / STRIPE, left = STRIPES - h->stripes;
        int count = whole < left ? whole : left;
        lanes sums = h->sums;
        for (int i = 0; i < count; i++)
            add_stripe(&sums, p + i * STRIPE, h->key + h->stripes + i);
        h->sums = sums;
        h->stripes += count;
        if (h->stripes == STRIPES)
            multiply(h);
        p += count * STRIPE;
        size -= count * STRIPE;
    }
    if (size) {
        char padded[STRIPE] = {0};
        memcpy(padded, p, size);
        add_stripe(&h->sums, padded, h->key + h->stripes);
        if (++h->stripes == STRIPES)
            multiply(h);
    }
}

uint64_t kv_hash(const char *const *bases, const int64_t *ids, const int64_t *sizes, int64_t parts, int64_t count,
                 uint64_t seed)
{
    struct hash h = {.stripes = 0};
    for (int i = 0; i < STRIPES + LANES; i++)
        h.key[i] = mixed(seed + (i + 1) * PRIME_1);
    read_lanes(&h.sums, h.key);
    for (int64_t p = 0; p < parts; p++)
        for (int64_t i = 0; i < count; i++)
            add_piece(&h, bases[p] + ids[i] * sizes[p], sizes[p]);
    uint64_t found = seed;
    for (int i = 0; i < LANES; i++)
        found = mixed(found ^ h.sums[i]) * PRIME_1 + PRIME_3;
    return mixed(found);
}
