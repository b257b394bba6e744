/* NCCL: collectives, sends and receives. */
#include "libraries/nccl.h"
#include "cuda/stream_marks.h"

#include <stdlib.h>
#include <string.h>

/* Source: nccl.h, ncclDataType_t, from ncclInt8 to ncclFloat8e5m2. */
static uint64_t bytes_of(uint64_t count, int type)
{
    static const unsigned char widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * (type >= 0 && (size_t)type < sizeof widths ? widths[type] : 8);
}

static status move(void *to, const void *from, uint64_t bytes, bool exact, const void *stream)
{
    COUNT(library_calls);
    note_stream_work(stream);
    if (exact)
        copy_on_device((uint64_t)to, (uint64_t)from, bytes);
    else
        forget((uint64_t)to, bytes);
    return SUCCESS;
}

static bool alone(const struct communicator *communicator) { return communicator->ranks == 1; }

static _Thread_local int groups; /* that the calling thread has begun, one inside of the other */

/* Mark what is asked of NCCL: elements sent and received, of a type. One kernel runs what a group has. */
static void mark_call(const char *name, uint64_t sent, uint64_t received, int type,
                      const struct communicator *communicator, const void *stream)
{
    if (alone(communicator))
        return;
    mark("nccl:%s:%lu:%lu:%d:%d:%p:%p", name, sent, received, type, communicator->ranks,
         (const void *)communicator, stream);
    if (groups == 0)
        mark_launch();
}

/* Whether the ranks exchange buffers of this many bytes. It must not depend on what one of them knows. */
static bool exchanges(const struct communicator *communicator, uint64_t bytes)
{
    return ranks_exist() && !alone(communicator) && bytes <= LONGEST_REMEMBERED && !any_capture();
}

static bool exchange_all(struct communicator *communicator, uint64_t from, uint64_t bytes,
                         struct exchanged *received)
{
    return exchange_device_bytes(communicator->id.bytes, communicator->exchanges++, communicator->ranks,
                                 communicator->rank, from, bytes, received);
}

/* Each rank sends `bytes` to this one: those from `at` on of what it sends in all. */
static status exchange_parts(uint64_t to, uint64_t from, uint64_t sent, uint64_t at, uint64_t bytes,
                             struct communicator *communicator)
{
    struct exchanged received;
    if (!exchange_all(communicator, from, sent, &received))
        return REMOTE_ERROR;
    for (int rank = 0; to && rank < communicator->ranks; rank++)
        receive_exchanged(to + (uint64_t)rank * bytes, &received, rank, at, bytes);
    exchange_end(&received);
    return SUCCESS;
}

/* Each rank sends as many bytes to this one. The ranks run one program, so what others that do not exist send is
 * taken to be what this rank sends. */
static status receive_from_all(void *to, const void *from, uint64_t bytes, struct communicator *communicator,
                               const void *stream)
{
    uint64_t total = bytes * (uint64_t)communicator->ranks;
    if (exchanges(communicator, total)) {
        COUNT(library_calls);
        return exchange_parts((uint64_t)to, (uint64_t)from, bytes, 0, bytes, communicator);
    }
    if (alone(communicator) || ranks_exist() || total > LONGEST_REMEMBERED)
        return move(to, from, total, alone(communicator), stream);
    COUNT(library_calls);
    note_stream_work(stream);
    for (uint64_t at = 0; at < total; at += bytes)
        if ((uint64_t)to + at != (uint64_t)from) /* in place: this rank's part is there already */
            copy_on_device((uint64_t)to + at, (uint64_t)from, bytes);
    return SUCCESS;
}

/* Wait for the ranks that exist, as each reduction does. */
static status wait_for_ranks(uint64_t bytes, struct communicator *communicator)
{
    struct exchanged received;
    if (!exchanges(communicator, bytes))
        return SUCCESS;
    if (!exchange_all(communicator, 0, 0, &received))
        return REMOTE_ERROR;
    exchange_end(&received);
    return SUCCESS;
}

#define PLAIN_OPERATIONS 5 /* sum, product, maximum, minimum, average: each of one value is that value */

static status reduce(const void *send, void *receive, uint64_t bytes, int operation,
                     struct communicator *communicator, const void *stream)
{
    status result = wait_for_ranks(bytes, communicator);
    if (result != SUCCESS)
        return result;
    return move(receive, send, bytes, alone(communicator) && operation < PLAIN_OPERATIONS, stream);
}

API status ncclAllReduce(const void *send, void *receive, size_t count, int type, int operation,
                         struct communicator *communicator, void *stream)
{
    mark_call("all_reduce", count, count, type, communicator, stream);
    communicator_reduces(communicator->memory);
    return reduce(send, receive, bytes_of(count, type), operation, communicator, stream);
}

API status ncclReduce(const void *send, void *receive, size_t count, int type, int operation, int root,
                      struct communicator *communicator, void *stream)
{
    mark_call("reduce", count, count, type, communicator, stream);
    communicator_collects(communicator->memory);
    if (communicator->rank != root) /* only the root receives */
        return wait_for_ranks(bytes_of(count, type), communicator);
    return reduce(send, receive, bytes_of(count, type), operation, communicator, stream);
}

API status ncclReduceScatter(const void *send, void *receive, size_t receive_count, int type, int operation,
                             struct communicator *communicator, void *stream)
{
    mark_call("reduce_scatter", receive_count * (uint64_t)communicator->ranks, receive_count, type,
              communicator, stream);
    communicator_collects(communicator->memory);
    return reduce(send, receive, bytes_of(receive_count, type), operation, communicator, stream);
}

/* A group in which each rank broadcasts is an all-gather, as PyTorch 2.15 makes it of lists: what a root that does not
 * exist sends is taken to be what this rank sends in the group, unless it sends several of that size. */
struct broadcast {
    struct broadcast *next;
    const void *from; /* of this rank; else NULL */
    void *to;
    uint64_t bytes;
};
static _Thread_local struct broadcast *grouped;

static void keep_for_group(const void *from, void *to, uint64_t bytes)
{
    struct broadcast *kept = malloc(sizeof *kept);
    if (kept == NULL)
        return;
    *kept = (struct broadcast){grouped, from, to, bytes};
    grouped = kept;
}

static const struct broadcast *only_own_broadcast(uint64_t bytes)
{
    const struct broadcast *found = NULL;
    for (const struct broadcast *each = grouped; each; each = each->next)
        if (each->from && each->bytes == bytes) {
            if (found)
                return NULL;
            found = each;
        }
    return found;
}

static void end_broadcasts(void)
{
    for (const struct broadcast *each = grouped; each; each = each->next) {
        const struct broadcast *own = each->from ? NULL : only_own_broadcast(each->bytes);
        if (own)
            copy_on_device((uint64_t)each->to, (uint64_t)own->from, each->bytes);
    }
    while (grouped) {
        struct broadcast *next = grouped->next;
        free(grouped);
        grouped = next;
    }
}

API status ncclBroadcast(const void *send, void *receive, size_t count, int type, int root,
                         struct communicator *communicator, void *stream)
{
    mark_call("broadcast", count, count, type, communicator, stream);
    communicator_collects(communicator->memory);
    uint64_t bytes = bytes_of(count, type);
    bool is_root = communicator->rank == root;
    if (exchanges(communicator, bytes)) {
        struct exchanged received;
        COUNT(library_calls);
        if (!exchange_all(communicator, is_root ? (uint64_t)send : 0, bytes, &received))
            return REMOTE_ERROR;
        receive_exchanged((uint64_t)receive, &received, root, 0, bytes);
        exchange_end(&received);
        return SUCCESS;
    }
    if (groups && !ranks_exist() && !alone(communicator) && bytes <= LONGEST_REMEMBERED)
        keep_for_group(is_root ? send : NULL, receive, bytes);
    bool exact = is_root || !ranks_exist(); /* a root that does not exist sends what this rank has */
    return move(receive, send, bytes, exact, stream);
}

CALL(ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *communicator,
               void *stream),
     ncclBroadcast(buffer, buffer, count, type, root, communicator, stream))

API status ncclAllGather(const void *send, void *receive, size_t send_count, int type,
                         struct communicator *communicator, void *stream)
{
    mark_call("all_gather", send_count, send_count * (uint64_t)communicator->ranks, type, communicator,
              stream);
    communicator_collects(communicator->memory);
    return receive_from_all(receive, send, bytes_of(send_count, type), communicator, stream);
}

API status ncclAlltoAll(const void *send, void *receive, size_t count, int type,
                        struct communicator *communicator, void *stream)
{
    uint64_t all = count * (uint64_t)communicator->ranks;
    mark_call("all_to_all", all, all, type, communicator, stream);
    communicator_sends(communicator->memory, 0, communicator->ranks);
    communicator_receives(communicator->memory, 0, communicator->ranks);
    uint64_t bytes = bytes_of(count, type), total = bytes * (uint64_t)communicator->ranks;
    if (exchanges(communicator, total)) {
        uint64_t own = (uint64_t)communicator->rank * bytes; /* of what each rank sends */
        return exchange_parts((uint64_t)receive, (uint64_t)send, total, own, bytes, communicator);
    }
    return receive_from_all(receive, send, bytes, communicator, stream);
}

API status ncclGather(const void *send, void *receive, size_t count, int type, int root,
                      struct communicator *communicator, void *stream)
{
    mark_call("gather", count, count * (uint64_t)communicator->ranks, type, communicator, stream);
    if (communicator->rank != root) {
        communicator_sends(communicator->memory, root, 1);
        uint64_t bytes = bytes_of(count, type);
        if (exchanges(communicator, bytes * (uint64_t)communicator->ranks))
            return exchange_parts(0, (uint64_t)send, bytes, 0, bytes, communicator);
        return SUCCESS;
    }
    communicator_receives(communicator->memory, 0, communicator->ranks);
    return receive_from_all(receive, send, bytes_of(count, type), communicator, stream);
}

/* The next message from this rank to another, or from that one to this. Both count alike: NCCL requires that each
 * message that is sent is received, with the same size. */
static struct message next_message(struct communicator *communicator, int peer, bool sends)
{
    struct message next = {.call = communicator->messages[peer][sends]++,
                           .from = sends ? communicator->rank : peer,
                           .to = sends ? peer : communicator->rank};
    memcpy(next.group, communicator->id.bytes, sizeof next.group);
    return next;
}

API status ncclSend(const void *send, size_t count, int type, int peer, struct communicator *communicator,
                    void *stream)
{
    if (peer != communicator->rank)
        mark_call("send", count, 0, type, communicator, stream);
    communicator_sends(communicator->memory, peer, 1);
    note_stream_work(stream);
    struct message next = next_message(communicator, peer, true);
    uint64_t bytes = bytes_of(count, type);
    if (exchanges(communicator, bytes) && !send_message(&next, (uint64_t)send, bytes))
        return REMOTE_ERROR;
    return SUCCESS;
}

API status ncclRecv(void *receive, size_t count, int type, int peer, struct communicator *communicator,
                    void *stream)
{
    if (peer != communicator->rank)
        mark_call("recv", 0, count, type, communicator, stream);
    communicator_receives(communicator->memory, peer, 1);
    struct message next = next_message(communicator, peer, false);
    uint64_t bytes = bytes_of(count, type);
    if (!exchanges(communicator, bytes))
        return move(receive, NULL, bytes, false, stream);
    COUNT(library_calls);
    remember_message((uint64_t)receive, bytes, &next);
    return SUCCESS;
}

/* A group writes nothing else than its calls: what they received is still on record. */
ENTRY(ncclGroupStart(void), groups++)

API status ncclGroupEnd(void)
{
    if (groups > 0 && --groups == 0) {
        end_broadcasts();
        mark_launch();
    }
    return SUCCESS;
}
