/* Streams and events. Work is finished the moment it is issued, so waiting never waits.
 *
 * The exception is for tests: while ghost_hold_events is on, a recorded event takes a ticket and
 * stays "not ready" until anything synchronises or the hold is released. That is how PyTorch's
 * deferred frees (record_stream) are driven.
 */
#include "ghost.h"
#include "streams.h"

#include <stdlib.h>
#include <time.h>

#define FASTEST_MS 0.001f /* events are never 0 ms apart: scripts divide by it */

struct event {
    uint64_t ticket;  /* 0: finished when it was recorded */
    uint64_t capture; /* of the stream it was recorded on */
    bool recorded;
    struct timespec at;
    uint64_t work; /* kernels and library calls before it */
};

static uint64_t last_ticket, finished_ticket;
static bool held;
static _Thread_local float answered_ms; /* 0: the host's own time */

/* Answer this thread's questions for elapsed time with one duration, or no longer if it is 0. */
API void ghost_answer_elapsed(float milliseconds) { answered_ms = milliseconds; }

API void ghost_hold_events(int on)
{
    ghost_lock();
    held = on;
    if (!on)
        finished_ticket = last_ticket;
    ghost_unlock();
}

void everything_synchronized(void)
{
    ghost_lock();
    finished_ticket = last_ticket;
    ghost_unlock();
    pools_synchronized();
}

/* ---- Streams --------------------------------------------------------------------------------- */

/* The default streams are small integers, not handles. Source: driver_types.h, cudaStreamLegacy 1
 * and cudaStreamPerThread 2. */
static struct stream *made_stream(const void *handle)
{
    return (uint64_t)handle > 2 ? (struct stream *)handle : NULL;
}

uint64_t stream_capture(const void *handle)
{
    const struct stream *stream = made_stream(handle);
    return stream && capture_is_active(stream->capture) ? stream->capture : 0;
}

void stream_join_capture(void *handle, uint64_t capture)
{
    struct stream *stream = made_stream(handle);
    if (stream)
        stream->capture = capture;
}

API status cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    status result = ghost_new_handle(stream, sizeof(struct stream));
    if (result != SUCCESS)
        return ghost_fail(result);
    *(struct stream *)*stream = (struct stream){.priority = priority, .flags = flags};
    return SUCCESS;
}

API status cudaStreamCreateWithFlags(void **stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

API status cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API status cudaStreamDestroy(void *stream)
{
    free(made_stream(stream));
    return SUCCESS;
}

API status cudaStreamGetPriority(void *stream, int *priority)
{
    *priority = made_stream(stream) ? made_stream(stream)->priority : 0;
    return SUCCESS;
}

API status cudaStreamGetFlags(void *stream, unsigned *flags)
{
    *flags = made_stream(stream) ? made_stream(stream)->flags : 0;
    return SUCCESS;
}

API status cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5; /* as on every card since Pascal */
    return SUCCESS;
}

API status cudaStreamQuery(void *stream)
{
    ghost_lock();
    bool waiting = finished_ticket < last_ticket;
    ghost_unlock();
    return waiting ? ghost_fail(NOT_READY) : SUCCESS;
}

API status cudaStreamSynchronize(void *stream)
{
    everything_synchronized();
    return SUCCESS;
}

API status cuStreamSynchronize(void *stream) { return cudaStreamSynchronize(stream); }

API status cudaDeviceSynchronize(void)
{
    everything_synchronized();
    return SUCCESS;
}

API status cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }

API status cudaStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    /* Waiting for an event of a capturing stream draws this one into the capture. */
    const struct event *event = handle;
    if (event->capture && capture_is_active(event->capture))
        stream_join_capture(stream, event->capture);
    return SUCCESS;
}

API status cudaStreamAddCallback(void *stream, void (*callback)(void *, status, void *), void *data,
                                 unsigned flags)
{
    callback(stream, SUCCESS, data);
    return SUCCESS;
}

API status cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data)
{
    note_captured_node(stream);
    if (!stream_capture(stream)) /* in a graph it runs when the graph does, which it never does */
        function(data);
    return SUCCESS;
}

API status cuLaunchHostFunc(void *stream, void (*function)(void *), void *data)
{
    return cudaLaunchHostFunc(stream, function, data);
}

API status cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags)
{
    note_captured_node(stream);
    forget(address, sizeof value);
    return SUCCESS;
}

/* ---- Events ---------------------------------------------------------------------------------- */

API status cudaEventCreateWithFlags(void **event, unsigned flags)
{
    return ghost_new_handle(event, sizeof(struct event));
}

API status cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }

API status cudaEventDestroy(void *event)
{
    free(event);
    return SUCCESS;
}

static uint64_t work_so_far(void)
{
    return __atomic_load_n(&ghost_counts.launches, __ATOMIC_RELAXED) +
           __atomic_load_n(&ghost_counts.library_calls, __ATOMIC_RELAXED);
}

API status cudaEventRecord(struct event *event, void *stream)
{
    event->recorded = true;
    event->capture = stream_capture(stream);
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    event->work = work_so_far();
    ghost_lock();
    event->ticket = held ? ++last_ticket : 0;
    ghost_unlock();
    return SUCCESS;
}

API status cudaEventRecordWithFlags(struct event *event, void *stream, unsigned flags)
{
    return cudaEventRecord(event, stream);
}

static bool finished(const struct event *event)
{
    ghost_lock();
    bool done = event->ticket <= finished_ticket;
    ghost_unlock();
    return done;
}

API status cudaEventQuery(struct event *event) { return finished(event) ? SUCCESS : ghost_fail(NOT_READY); }

API status cudaEventSynchronize(struct event *event)
{
    event->ticket = 0;
    return SUCCESS;
}

/* The host's own time between the two records: a duration of the dry run, not of any GPU. Whoever times a
 * single piece of work means to compare it with others (cudnn.benchmark does): all of them are as fast, so
 * that what is chosen is the first, and the same in every run. What is known to compare longer pieces of
 * work (ghost/compile/torch_compile.py) has the answer chosen for it. */
API status cudaEventElapsedTime(float *milliseconds, struct event *start, struct event *end)
{
    if (!start->recorded || !end->recorded)
        return ghost_fail(INVALID_HANDLE);
    if (!finished(start) || !finished(end))
        return ghost_fail(NOT_READY);
    float elapsed = 1e3f * (float)(end->at.tv_sec - start->at.tv_sec) +
                    1e-6f * (float)(end->at.tv_nsec - start->at.tv_nsec);
    bool single = end->work - start->work <= 1;
    *milliseconds = answered_ms > 0                    ? answered_ms
                    : !single && elapsed > FASTEST_MS ? elapsed
                                                      : FASTEST_MS;
    return SUCCESS;
}
