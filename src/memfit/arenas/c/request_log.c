/* Every request, in order: a trace is made of it. */

#include <time.h>

#include "arena.h"

void request_log_add(request_log *log, const void *pointer, int64_t size, uintptr_t lane)
{
    logged_request *place = log->count < log->limit ? array_append(log) : NULL;
    if (!place)
        return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t time = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
    *place = (logged_request){(uint64_t)(uintptr_t)pointer, size, time, lane};
}
