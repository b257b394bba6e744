/* What streams.c and graphs.c tell each other about captures. */
#ifndef MEMFIT_GHOST_STREAMS_H
#define MEMFIT_GHOST_STREAMS_H

#include "ghost.h"

struct stream {
    int priority;
    unsigned flags;
    uint64_t capture; /* the last capture it took part in; 0 for none */
};

/* The id of the capture a stream takes part in now, or 0. */
uint64_t stream_capture(const void *handle);
void stream_join_capture(void *handle, uint64_t capture);
bool capture_is_active(uint64_t capture);

#endif
