/* What the ranks of a communicator send each other, where the other ranks exist: each is a process on a ghost of
 * its own. The function set with ghost_set_exchange carries the bytes, and waits for the other ranks.
 */
#include "libraries/nccl.h"

static ghost_exchange carry;
static ghost_message carry_message, fetch_message;

API void ghost_set_exchange(ghost_exchange function) { carry = function; }

API void ghost_set_messages(ghost_message send, ghost_message receive)
{
    carry_message = send;
    fetch_message = receive;
}

bool ranks_exist(void) { return carry != NULL; }

bool exchange(const char *group, uint64_t call, int ranks, int rank, const void *sent, uint64_t bytes,
              struct exchanged *received)
{
    received->each = bytes;
    received->bytes = calloc((size_t)ranks, bytes ? bytes : 1);
    received->known = calloc((size_t)ranks, 1);
    if (received->bytes && received->known &&
        carry(group, call, ranks, rank, sent, bytes, received->bytes, received->known) == 0)
        return true;
    exchange_end(received);
    return false;
}

bool exchange_device_bytes(const char *group, uint64_t call, int ranks, int rank, uint64_t from,
                           uint64_t bytes, struct exchanged *received)
{
    unsigned char sent[LONGEST_REMEMBERED];
    bool known = from && recall_copy(sent, from, bytes);
    return exchange(group, call, ranks, rank, known ? sent : NULL, bytes, received);
}

void receive_exchanged(uint64_t to, const struct exchanged *received, int source, uint64_t at, uint64_t bytes)
{
    if (received->known[source])
        remember_copy(to, received->bytes + (uint64_t)source * received->each + at, bytes);
    else
        forget(to, bytes);
}

void exchange_end(struct exchanged *received)
{
    free(received->bytes);
    free(received->known);
}

bool send_message(const struct message *message, uint64_t from, uint64_t bytes)
{
    unsigned char sent[LONGEST_REMEMBERED];
    bool known = recall_copy(sent, from, bytes);
    return carry_message && carry_message(message->group, message->call, message->from, message->to,
                                          known ? sent : NULL, bytes) == 0;
}

bool receive_message(const struct message *message, void *received, uint64_t bytes)
{
    return fetch_message &&
           fetch_message(message->group, message->call, message->from, message->to, received, bytes) == 1;
}
