/* Events: when each was recorded, on which capture, and whether a test still holds it. */
#include "cuda/stream_captures.h"
#include "cuda/stream_marks.h"

#include <time.h>

/* Where marks are left, the thread that issues a collective does not find it done before a stream waits for it,
 * or before it has asked this often: a card takes longer, and PyTorch waits only for what is not done. Source:
 * synchronizeInternal, torch/csrc/distributed/c10d/nccl2/WorkNCCL.cpp, PyTorch 2.15. */
#define QUESTIONS 100
#define FASTEST_MS 0.001f /* events are never 0 ms apart: scripts divide by it */

struct event {
    uint64_t ticket; /* 0: finished when it was recorded */
    const void *stream;
    uint64_t capture; /* of the stream it was recorded on */
    bool recorded;
    struct timespec at;
    uint64_t work;        /* kernels and library calls before it */
    const void *recorder; /* the thread */
    int questions;        /* of that thread, which are still answered with "not ready" */
};

static _Thread_local char here;         /* its address is the thread's own */
static _Thread_local float answered_ms; /* 0: the host's own time */

API void ghost_answer_elapsed(float milliseconds) { answered_ms = milliseconds; }

HANDLE(cudaEventCreate, cudaEventDestroy, struct event)

API status cudaEventCreateWithFlags(void **event, unsigned flags) { return cudaEventCreate(event); }

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
    event->ticket = take_ticket();
    event->stream = stream;
    event->recorder = &here;
    event->questions = follows_launch() ? QUESTIONS : 0;
    mark("record:%p:%p", (void *)event, stream);
    return SUCCESS;
}

CALL(cudaEventRecordWithFlags(struct event *event, void *stream, unsigned flags),
     cudaEventRecord(event, stream))

API status cudaEventQuery(struct event *event)
{
    bool done = event->recorder != &here || !event->questions || !--event->questions;
    return done && ticket_is_finished(event->stream, event->ticket) ? SUCCESS : ghost_fail(NOT_READY);
}

API status cudaEventSynchronize(struct event *event)
{
    mark("synchronize_event:%p", (void *)event);
    host_waits(event->stream, event->ticket);
    event->ticket = event->questions = 0;
    return SUCCESS;
}

/* The host's own time between the two records: a duration of the dry run, not of any GPU. A caller that
 * times a single piece of work compares it with alternatives (cudnn.benchmark does): all take equally long
 * here, so the first one wins in every run. For a caller known to compare longer pieces of work
 * (ghost/compile/isolate_torch_compile.py), ghost_answer_elapsed sets the answer. */
API status cudaEventElapsedTime(float *milliseconds, struct event *start, struct event *end)
{
    if (!start->recorded || !end->recorded)
        return ghost_fail(INVALID_HANDLE);
    if (!ticket_is_finished(start->stream, start->ticket) || !ticket_is_finished(end->stream, end->ticket))
        return ghost_fail(NOT_READY);
    float elapsed = 1e3f * (float)(end->at.tv_sec - start->at.tv_sec) +
                    1e-6f * (float)(end->at.tv_nsec - start->at.tv_nsec);
    bool single = end->work - start->work <= 1;
    *milliseconds = answered_ms > 0 ? answered_ms : !single && elapsed > FASTEST_MS ? elapsed : FASTEST_MS;
    return SUCCESS;
}

API status cudaStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    /* Waiting for an event of a capturing stream draws this one into the capture. */
    struct event *event = handle;
    if (leaves_marks())
        event->questions = 0;
    stream_waits(stream, event->stream, event->ticket);
    mark("wait:%p:%p", handle, stream);
    if (event->capture && capture_is_active(event->capture))
        stream_join_capture(stream, event->capture);
    return SUCCESS;
}
