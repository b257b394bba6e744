/* Streams, the captures they take part in, and the graphs that these make. */
#ifndef MEMFIT_GHOST_CAPTURES_H
#define MEMFIT_GHOST_CAPTURES_H

#include "core/ghost.h"

struct stream {
    int priority;
    unsigned flags;
    uint64_t capture; /* the last capture it took part in; 0 for none */
};

/* NULL for a default stream, whose handle is a small integer. Source: driver_types.h, cudaStreamLegacy 1 and
 * cudaStreamPerThread 2. */
static inline struct stream *created_stream(const void *handle)
{
    return (uint64_t)handle > 2 ? (struct stream *)handle : NULL;
}

/* The id of the capture a stream takes part in now, or 0. */
uint64_t stream_capture(const void *handle);
void stream_join_capture(void *handle, uint64_t capture);
bool capture_is_active(uint64_t capture);

struct held_object;

/* A graph and the executables made from it share what they hold. */
struct graph {
    int references;
    size_t nodes;
    struct held_object *held;
};

status graph_release(struct graph *graph);

#endif
