/* Whole spans of context that several sequences have in the same blocks, as those with one prefix do. Such a span is
 * attended once for all of them: its keys and values meet a tile full of rows instead of one sequence's few.
 *
 * Shapes: decodes of any number, on any context. sharing.c has the limit of the search, attention.c that of the rows. */
#pragma once

#include "attention.h"

struct shared_span {
    int span;
    int sequence; /* one of those who share it */
    int first, count; /* of `tokens` */
};

struct sharing {
    const struct shared_span *spans;
    int count; /* 0: nothing is shared, and nothing else here counts */
    const int *tokens; /* of the batch: whose queries see these spans whole */
    int num_tokens;
    const int *places; /* [sequences][num_spans]: a sequence's first token in `tokens`; -1: it attends to this alone */
    int num_spans;
};

/* Sequences with more than `most_queries` are left alone. What is found lasts until the next call. */
struct sharing sharing_find(struct pool *pool, const struct batch *b, const struct layer *l, int most_queries);

INLINE int shared_place(const struct sharing *sharing, int sequence, int span)
{
    return sharing->count && span < sharing->num_spans ? sharing->places[sequence * sharing->num_spans + span] : -1;
}
