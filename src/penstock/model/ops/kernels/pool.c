/* A pool of threads that claim small chunks from one atomic word.
 *
 * Shapes: any number of chunks, on a fixed number of threads. Limit: the way of one cache line between cores, for each
 * claim. Not measured by itself.
 *
 * The word holds the job's generation and how many chunks are left to claim. A chunk is claimed by compare-and-swap,
 * so whoever holds one knows that its job is still the current one: the caller cannot leave before it is done. Nobody
 * waits for a thread that holds no chunk; one that the system has put aside delays at most the chunk in its hands.
 * Idle threads spin for some microseconds, which covers the gap between two operations of a step, and then sleep. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SPIN_NS 50000
#define CACHE_LINE 64
#define LEFT(state) ((uint32_t)(state))

struct pool {
    _Alignas(CACHE_LINE) atomic_uint_least64_t state; /* generation << 32 | chunks left */
    _Alignas(CACHE_LINE) atomic_int done;
    _Alignas(CACHE_LINE) task run; /* the job; written only while no chunk is out */
    void *argument;
    int chunks;
    int threads;
    atomic_int sleeping;
    atomic_int stopping;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t *ids;
    void *scratch[PURPOSES];
    size_t scratch_bytes[PURPOSES];
};

struct worker {
    struct pool *pool;
    int thread;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void work(struct pool *pool, int thread)
{
    uint64_t state = atomic_load(&pool->state);
    while (LEFT(state)) {
        if (!atomic_compare_exchange_weak(&pool->state, &state, state - 1)) continue;
        pool->run(pool->argument, pool->chunks - (int)LEFT(state), thread);
        atomic_fetch_add(&pool->done, 1);
        state = atomic_load(&pool->state);
    }
}

static int has_news(struct pool *pool)
{
    return LEFT(atomic_load(&pool->state)) || atomic_load(&pool->stopping);
}

static void await_news(struct pool *pool)
{
    int64_t deadline = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (has_news(pool)) return;
            relax();
        }
    } while (now_ns() < deadline);
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleeping, 1); /* before looking again: the caller publishes, then looks at `sleeping` */
    while (!has_news(pool)) pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->sleeping, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *argument)
{
    struct worker worker = *(struct worker *)argument;
    free(argument);
    while (!atomic_load(&worker.pool->stopping)) {
        work(worker.pool, worker.thread);
        await_news(worker.pool);
    }
    return NULL;
}

static void wake_sleepers(struct pool *pool)
{
    if (!atomic_load(&pool->sleeping)) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

void pool_run(struct pool *pool, int chunks, task run, void *argument)
{
    if (chunks <= 1 || pool->threads == 1) {
        for (int chunk = 0; chunk < chunks; chunk++) run(argument, chunk, 0);
        return;
    }
    pool->run = run;
    pool->argument = argument;
    pool->chunks = chunks;
    atomic_store(&pool->done, 0);
    uint64_t generation = (atomic_load(&pool->state) >> 32) + 1;
    atomic_store(&pool->state, generation << 32 | (uint32_t)chunks);
    wake_sleepers(pool);
    work(pool, 0);
    for (int spins = 0; atomic_load(&pool->done) < chunks; spins++) {
        if (spins < 1000) relax();
        else sched_yield(); /* the thread we wait for may need this very core */
    }
}

struct pool *pool_new(int threads)
{
    struct pool *pool = aligned_alloc(CACHE_LINE, (sizeof *pool + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->ids = calloc((size_t)threads, sizeof *pool->ids);
    pool->threads = 1;
    for (int thread = 1; thread < threads; thread++) {
        struct worker *worker = malloc(sizeof *worker);
        *worker = (struct worker){pool, thread};
        if (pthread_create(&pool->ids[thread], NULL, worker_main, worker)) {
            free(worker);
            break;
        }
        pool->threads++;
    }
    return pool;
}

void pool_free(struct pool *pool)
{
    atomic_store(&pool->stopping, 1);
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int thread = 1; thread < pool->threads; thread++) pthread_join(pool->ids[thread], NULL);
    for (int i = 0; i < PURPOSES; i++) free(pool->scratch[i]);
    free(pool->ids);
    free(pool);
}

int pool_threads(const struct pool *pool) { return pool->threads; }

void *pool_scratch(struct pool *pool, enum purpose purpose, size_t bytes)
{
    if (pool->scratch_bytes[purpose] < bytes) {
        bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
        free(pool->scratch[purpose]);
        pool->scratch[purpose] = aligned_alloc(4096, bytes);
        pool->scratch_bytes[purpose] = bytes;
        if (!pool->scratch[purpose]) abort(); /* out of memory in the middle of a step: nothing can be saved */
    }
    return pool->scratch[purpose];
}
