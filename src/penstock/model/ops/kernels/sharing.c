/* The finding of sharing.h. Blocks are shared from the first one on: who differs in a span has nothing in common behind
 * it, so a step in which nothing is shared costs one look at the first blocks.
 *
 * Shapes: any batch; whole spans of 256 positions count. Limit: the reading of block tables, once a step. Not measured
 * by itself. */
#include "sharing.h"

#include "span.h"

#include <stdlib.h>

struct candidate {
    int block; /* the span's first */
    int sequence;
};

struct search {
    const struct batch *batch;
    const struct layer *layer;
    struct candidate *candidates;
    struct shared_span *spans;
    int *tokens, *places;
    struct sharing found;
};

static int queries_of(const struct batch *b, int sequence) { return b->query_starts[sequence + 1] - b->query_starts[sequence]; }

/* Spans that lie before all of a sequence's queries. */
static int whole_spans(const struct batch *b, const struct layer *l, int sequence)
{
    return kept(l, b->context_lens[sequence] - queries_of(b, sequence)) / SPAN;
}

static const int32_t *blocks_at(const struct search *s, int sequence, int span)
{
    return s->batch->block_tables + (size_t)sequence * s->batch->table_stride + span * SPAN / s->layer->block_size;
}

static int is_same(const struct search *s, int a, int b, int span)
{
    int blocks = ceil_div((span + 1) * SPAN, s->layer->block_size) - span * SPAN / s->layer->block_size;
    return !memcmp(blocks_at(s, a, span), blocks_at(s, b, span), (size_t)blocks * sizeof(int32_t));
}

static int by_block(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return x->block != y->block ? (x->block > y->block) - (x->block < y->block) : x->sequence - y->sequence;
}

static void add(struct search *s, int sequence, int span)
{
    s->places[sequence * s->found.num_spans + span] = s->found.num_tokens;
    for (int token = s->batch->query_starts[sequence]; token < s->batch->query_starts[sequence + 1]; token++)
        s->tokens[s->found.num_tokens++] = token;
}

/* Those of `count` candidates who share a span stay, and come first. Returns how many they are. */
static int share_span(struct search *s, int span, int count)
{
    struct candidate *all = s->candidates;
    int left = 0;
    for (int i = 0; i < count; i++)
        if (span < whole_spans(s->batch, s->layer, all[i].sequence))
            all[left++] = (struct candidate){*blocks_at(s, all[i].sequence, span), all[i].sequence};
    qsort(all, (size_t)left, sizeof *all, by_block);
    int kept = 0;
    for (int begin = 0, end; begin < left; begin = end) {
        for (end = begin + 1; end < left && is_same(s, all[begin].sequence, all[end].sequence, span); end++) continue;
        if (end - begin < 2) continue;
        int first = s->found.num_tokens, sequence = all[begin].sequence;
        for (int i = begin; i < end; i++) {
            add(s, all[i].sequence, span);
            all[kept++] = all[i];
        }
        s->spans[s->found.count++] = (struct shared_span){span, sequence, first, s->found.num_tokens - first};
    }
    return kept;
}

struct sharing sharing_find(struct pool *pool, const struct batch *b, const struct layer *l, int most_queries)
{
    struct search s = {.batch = b, .layer = l};
    int num_spans = 0, num_queries = 0, count = 0;
    for (int sequence = 0; sequence < b->sequences; sequence++) {
        if (queries_of(b, sequence) > most_queries || !whole_spans(b, l, sequence)) continue;
        if (whole_spans(b, l, sequence) > num_spans) num_spans = whole_spans(b, l, sequence);
        num_queries += queries_of(b, sequence);
        count++;
    }
    if (count < 2) return s.found;
    size_t places = (size_t)b->sequences * num_spans, spans = (size_t)count / 2 * num_spans;
    char *at = pool_scratch(pool, SCRATCH_SHARING, count * sizeof *s.candidates + spans * sizeof *s.spans +
                                                       (places + (size_t)num_queries * num_spans) * sizeof(int));
    s.candidates = (struct candidate *)at;
    s.spans = (struct shared_span *)(s.candidates + count);
    s.places = (int *)(s.spans + spans);
    s.tokens = s.places + places;
    s.found = (struct sharing){s.spans, 0, s.tokens, 0, s.places, num_spans};
    memset(s.places, -1, places * sizeof(int));
    count = 0;
    for (int sequence = 0; sequence < b->sequences; sequence++)
        if (queries_of(b, sequence) <= most_queries && whole_spans(b, l, sequence)) s.candidates[count++].sequence = sequence;
    for (int span = 0; count && span < num_spans; span++) count = share_span(&s, span, count);
    return s.found;
}
