/* Collectives through memory that all ranks of a host have mapped.
 *
 * Every rank has a line of its own and two slots. In round k it writes what it brings into slot k % 2, stamps its line
 * with k, waits until the others' lines say k, and reads their slots. A slot is written again in round k + 2, which
 * nobody reaches before all have stamped k + 1: by then they have read round k. So one wait a round is enough.
 *
 * Shapes: any; what is larger than a slot goes in pieces. Limit: the way of a cache line between cores for small sums
 * (about a microsecond), and for large ones the reading of all parts from memory. `python -m tools.ranks` measures it. */
#define _GNU_SOURCE
#include "ranks.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define LINE 128 /* bytes: neighbours of a cache line are fetched with it */
#define PAGE 4096
#define SPINS 2000 /* before the core is offered to others: the rank that is waited for may need it */
#define LOOK 64 /* yields between two looks at the clock */
#define CHUNK 8192 /* floats that a thread adds at a time */

struct line {
    atomic_uint stamp;
    atomic_int gone; /* 1 + a rank that this one knows to be gone */
};

static size_t rank_bytes(size_t slot_bytes) { return 2 * slot_bytes; }

size_t ranks_bytes(int size, size_t slot_bytes)
{
    return PAGE * (size_t)((size * LINE + PAGE - 1) / PAGE) + (size_t)size * rank_bytes(slot_bytes);
}

static struct line *line_of(const struct ranks *r, int rank) { return (struct line *)(r->base + (size_t)rank * LINE); }

static float *slot_of(const struct ranks *r, int rank, uint32_t round)
{
    unsigned char *slots = r->base + PAGE * (size_t)((r->size * LINE + PAGE - 1) / PAGE);
    return (float *)(slots + (size_t)rank * rank_bytes(r->slot_bytes) + (round & 1) * r->slot_bytes);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* 1 + a rank that somebody knows to be gone; 0: there is none. */
static int known_gone(const struct ranks *r)
{
    for (int rank = 0; rank < r->size; rank++) {
        int gone = atomic_load_explicit(&line_of(r, rank)->gone, memory_order_relaxed);
        if (gone) return gone;
    }
    return 0;
}

static int await(struct ranks *r, int other)
{
    atomic_uint *stamp = &line_of(r, other)->stamp;
    int64_t deadline = 0;
    for (unsigned i = 0; (int32_t)(atomic_load_explicit(stamp, memory_order_acquire) - r->round) < 0; i++) {
        if (i < SPINS) {
            relax();
            continue;
        }
        if (i % LOOK == 0) {
            int64_t now = now_ns();
            if (!deadline) deadline = now + r->timeout_ns;
            int gone = known_gone(r);
            if (gone || now > deadline) {
                r->lost = gone ? gone : 1 + other;
                ranks_give_up(r, r->lost - 1);
                return r->lost;
            }
        }
        sched_yield();
    }
    return 0;
}

static int meet(struct ranks *r)
{
    atomic_store_explicit(&line_of(r, r->rank)->stamp, r->round, memory_order_release);
    for (int other = 0; other < r->size; other++)
        if (other != r->rank && await(r, other)) return r->lost;
    return 0;
}

void ranks_give_up(struct ranks *r, int gone) { atomic_store(&line_of(r, r->rank)->gone, 1 + gone); }

float *ranks_slot(const struct ranks *r, size_t n)
{
    return n * sizeof(float) <= r->slot_bytes ? slot_of(r, r->rank, r->round + 1) : NULL;
}

struct sum {
    const struct ranks *ranks;
    float *out;
    size_t n;
};

static void sum_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct sum *s = argument;
    size_t begin = (size_t)chunk * CHUNK, end = begin + CHUNK < s->n ? begin + CHUNK : s->n;
    const float *first = slot_of(s->ranks, 0, s->ranks->round), *second = slot_of(s->ranks, 1, s->ranks->round);
    for (size_t i = begin; i < end; i++) s->out[i] = first[i] + second[i];
    for (int rank = 2; rank < s->ranks->size; rank++) {
        const float *part = slot_of(s->ranks, rank, s->ranks->round);
        for (size_t i = begin; i < end; i++) s->out[i] += part[i];
    }
}

int ranks_sum(struct pool *pool, struct ranks *r, const float *part, float *out, size_t n)
{
    size_t room = r->slot_bytes / sizeof(float);
    int64_t began = now_ns();
    for (size_t done = 0; done < n && !r->lost; done += room) {
        size_t count = n - done < room ? n - done : room;
        float *slot = slot_of(r, r->rank, ++r->round);
        if (slot != part) memcpy(slot, part + done, count * sizeof(float));
        if (meet(r)) break;
        struct sum sum = {r, out + done, count};
        pool_run(pool, (int)((count + CHUNK - 1) / CHUNK), sum_chunk, &sum);
    }
    r->spent_ns += now_ns() - began;
    return r->lost;
}

int ranks_gather(struct ranks *r, const float *part, float *out, size_t m, size_t n, size_t stride, int count)
{
    size_t rows = r->slot_bytes / sizeof(float) / n; /* a slot has room for a row of logits: see library.py */
    int first = r->rank / count * count;
    int64_t began = now_ns();
    for (size_t done = 0; done < m && !r->lost; done += rows) {
        size_t some = m - done < rows ? m - done : rows;
        float *slot = slot_of(r, r->rank, ++r->round);
        for (size_t row = 0; row < some; row++)
            memcpy(slot + row * n, part + (done + row) * stride, n * sizeof(float));
        if (meet(r)) break;
        for (int place = 0; place < count; place++) {
            const float *from = slot_of(r, first + place, r->round);
            for (size_t row = 0; row < some; row++)
                memcpy(out + ((done + row) * count + place) * n, from + row * n, n * sizeof(float));
        }
    }
    r->spent_ns += now_ns() - began;
    return r->lost;
}

int ranks_exchange(struct ranks *r, const float *parts, float *out, size_t m, size_t n, int count)
{
    size_t rows = r->slot_bytes / sizeof(float) / (n * count);
    int first = r->rank / count * count, own = r->rank - first;
    int64_t began = now_ns();
    for (size_t done = 0; done < m && !r->lost; done += rows) {
        size_t some = (m - done < rows ? m - done : rows) * n;
        float *slot = slot_of(r, r->rank, ++r->round);
        for (int place = 0; place < count; place++)
            memcpy(slot + place * some, parts + (place * m + done) * n, some * sizeof(float));
        if (meet(r)) break;
        for (int place = 0; place < count; place++)
            memcpy(out + (place * m + done) * n, slot_of(r, first + place, r->round) + own * some, some * sizeof(float));
    }
    r->spent_ns += now_ns() - began;
    return r->lost;
}
