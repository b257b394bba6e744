/* Events, captures, graphs. */
#include "checks.h"
#include "cuda/stream_marks.h"

#include <time.h>

/* ---- Streams, events, graphs ----------------------------------------------------------------- */

void held_events(void)
{
    void *stream, *event, *later;
    float elapsed = 0;
    cudaStreamCreateWithFlags(&stream, 1);
    cudaEventCreateWithFlags(&event, 0), cudaEventCreateWithFlags(&later, 0);
    CHECK(cudaEventElapsedTime(&elapsed, event, later) == INVALID_HANDLE); /* never recorded */
    cudaEventRecord(event, stream);
    CHECK(cudaEventQuery(event) == SUCCESS);
    ghost_hold_events(1);
    cudaEventRecord(later, stream);
    CHECK(cudaEventQuery(event) == SUCCESS && cudaEventQuery(later) == NOT_READY);
    ghost_hold_events(0);
    CHECK(cudaEventQuery(later) == SUCCESS);
    CHECK(cudaEventElapsedTime(&elapsed, event, later) == SUCCESS && elapsed > 0);
    ghost_answer_elapsed(250);
    CHECK(cudaEventElapsedTime(&elapsed, event, later) == SUCCESS && elapsed == 250);
    ghost_answer_elapsed(0);
    CHECK(cudaEventElapsedTime(&elapsed, event, later) == SUCCESS && elapsed != 250);
    ghost_hold_events(1);
    cudaEventRecord(later, stream);
    cudaDeviceSynchronize();
    CHECK(cudaEventQuery(later) == SUCCESS);
    cudaEventRecord(later, stream);
    cudaEventSynchronize(later); /* never waits */
    CHECK(cudaEventQuery(later) == SUCCESS);
    cudaEventDestroy(event), cudaEventDestroy(later), cudaStreamDestroy(stream);
}

/* Held until the host waits for its stream beyond it, or for a stream that waits for it. */
void events_until_awaited(void)
{
    void *side, *third, *first, *second, *elsewhere;
    cudaStreamCreateWithFlags(&side, 1), cudaStreamCreateWithFlags(&third, 1);
    cudaEventCreateWithFlags(&first, 0), cudaEventCreateWithFlags(&second, 0);
    cudaEventCreateWithFlags(&elsewhere, 0);
    ghost_hold_events(2);
    cudaEventRecord(first, side), cudaEventRecord(elsewhere, NULL), cudaEventRecord(second, side);
    cudaEventSynchronize(first);
    CHECK(cudaEventQuery(first) == SUCCESS);
    CHECK(cudaEventQuery(second) == NOT_READY && cudaEventQuery(elsewhere) == NOT_READY);
    cudaStreamWaitEvent(third, second, 0), cudaStreamWaitEvent(NULL, second, 0);
    CHECK(cudaEventQuery(second) == NOT_READY); /* the host may be ahead of both */
    cudaEventSynchronize(elsewhere);            /* recorded before its stream waited */
    CHECK(cudaEventQuery(elsewhere) == SUCCESS && cudaEventQuery(second) == NOT_READY);
    cudaEventRecord(elsewhere, third);
    cudaEventSynchronize(elsewhere);
    CHECK(cudaEventQuery(second) == SUCCESS);
    cudaEventRecord(first, side), cudaEventRecord(elsewhere, third);
    cudaStreamSynchronize(side);
    CHECK(cudaEventQuery(first) == SUCCESS && cudaEventQuery(elsewhere) == NOT_READY);
    cudaDeviceSynchronize();
    CHECK(cudaEventQuery(elsewhere) == SUCCESS);
    ghost_hold_events(0);
    cudaEventDestroy(first), cudaEventDestroy(second), cudaEventDestroy(elsewhere);
    cudaStreamDestroy(side), cudaStreamDestroy(third);
}

static char marks[1024];
static int mark_started(const char *name, void *keywords, const void *inputs, uint64_t count, void **record)
{
    strncat(strncat(marks, name, sizeof marks - strlen(marks) - 1), " ", sizeof marks - strlen(marks) - 1);
    *record = marks;
    return SUCCESS;
}
static int mark_ended(void *record) { return record == marks ? SUCCESS : INVALID_VALUE; }

void marked_streams(void)
{
    void *side, *event;
    char expected[1024];
    const dim3 one = {1, 1, 1};
    cudaStreamCreateWithFlags(&side, 1), cudaEventCreateWithFlags(&event, 0);
    ghost_mark_streams(mark_started, mark_ended);
    for (int again = 0; again < 2; again++) { /* a stream is marked when it changes */
        cudaLaunchKernel("k", one, one, NULL, 0, side);
        cudaEventRecord(event, side), cudaStreamWaitEvent(NULL, event, 0);
        ghost_pause_marks(1);
        cudaEventRecord(event, NULL);
        ghost_pause_marks(0);
    }
    ghost_mark_streams(NULL, NULL);
    cudaLaunchKernel("k", one, one, NULL, 0, NULL);
    char twice[256];
    snprintf(twice, sizeof twice, MARK "record:%p:%p " MARK "wait:%p:%p ", event, side, event, NULL);
    snprintf(expected, sizeof expected, MARK "stream:%p %s%s", side, twice, twice);
    CHECK(strcmp(marks, expected) == 0);
    cudaEventDestroy(event), cudaStreamDestroy(side);
}

/* A single piece of work always takes the shortest time; several take the host's own time. */
void elapsed_time(void)
{
    void *event, *later;
    float elapsed = 0;
    const struct timespec nap = {.tv_nsec = 5 * 1000 * 1000};
    cudaEventCreateWithFlags(&event, 0), cudaEventCreateWithFlags(&later, 0);
    for (int pieces = 0; pieces < 3; pieces++) {
        cudaEventRecord(event, NULL);
        for (int i = 0; i < pieces; i++)
            ghost_stub_called();
        nanosleep(&nap, NULL);
        cudaEventRecord(later, NULL);
        cudaEventElapsedTime(&elapsed, event, later);
        CHECK(pieces < 2 ? elapsed == 0.001f : elapsed >= 5);
    }
    cudaEventDestroy(event), cudaEventDestroy(later);
}

static int destroyed;
static void destroy(void *data) { destroyed += *(int *)data; }

void capturing_streams(void)
{
    configure(GIB);
    void *origin, *joined, *event, *graph, *executable, *object;
    unsigned long long id = 0, joined_id = 0;
    size_t nodes = 0;
    int active, one = 1;
    char *memory = allocated(4096);
    cudaMemset(memory, 3, 8);
    cudaStreamCreateWithFlags(&origin, 1), cudaStreamCreateWithFlags(&joined, 1);
    cudaEventCreateWithFlags(&event, 0);
    CHECK(cudaStreamBeginCapture(NULL, 0) == NOT_SUPPORTED);
    CHECK(cudaStreamEndCapture(origin, &graph) == CAPTURE_UNMATCHED);

    CHECK(cudaStreamBeginCapture(origin, 0) == SUCCESS);
    cudaStreamIsCapturing(joined, &active);
    CHECK(!active);
    cudaEventRecord(event, origin);
    cudaStreamWaitEvent(joined, event, 0);
    cudaStreamGetCaptureInfo_v3(origin, &active, &id, NULL, NULL, NULL, NULL);
    cudaStreamGetCaptureInfo_v3(joined, &active, &joined_id, NULL, NULL, NULL, NULL);
    CHECK(active && id != 0 && joined_id == id);
    cudaLaunchKernel("k", (dim3){1, 1, 1}, (dim3){1, 1, 1}, NULL, 0, joined);
    cudaMemset(memory, 4, 8); /* captured: it has not happened */
    cudaMemcpy(memory + 8, host, 8, 1);
    cudaMemcpy(memory + 16, memory, 8, 3);
    CHECK(cudaStreamEndCapture(joined, &graph) == CAPTURE_UNMATCHED);
    CHECK(cudaStreamEndCapture(origin, &graph) == SUCCESS);
    cudaStreamIsCapturing(joined, &active);
    CHECK(!active);
    CHECK(!read_back(memory, 8) && !read_back(memory + 8, 8) && !read_back(memory + 16, 8));
    CHECK(cudaGraphGetNodes(graph, NULL, &nodes) == SUCCESS && nodes == 1);

    cudaUserObjectCreate(&object, &one, destroy, 1, 1);
    cudaGraphRetainUserObject(graph, object, 1, 1);
    cudaGraphInstantiateWithFlags(&executable, graph, 0);
    cudaMemset(memory, 3, 8);
    CHECK(read_back(memory, 8));
    cudaGraphLaunch(executable, origin);
    CHECK(!read_back(memory, 8));
    cudaGraphDestroy(graph);
    CHECK(destroyed == 0); /* the executable holds it */
    cudaGraphExecDestroy(executable);
    CHECK(destroyed == 1);
    cudaEventDestroy(event), cudaStreamDestroy(origin), cudaStreamDestroy(joined), cudaFree(memory);
}
