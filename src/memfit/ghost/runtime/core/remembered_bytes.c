/* The bytes of device memory that are known for certain.
 *
 * No device memory exists, so a copy to the device stores nothing and a copy from it gives zeros, except
 * where the ghost can be certain of the bytes: a short copy from the host or a memset puts them on record,
 * and a copy back that is wholly on record is answered.
 *
 * A kernel's arguments are opaque pointers to values of unknown type, so a launch may have written
 * anywhere: any launch, graph launch or library call wipes the record. That is the only sound rule, and it
 * costs little, because what scripts read back unchanged (sizes exchanged between ranks, flags, constants
 * just made) is read before the next launch. Freeing, unmapping and newer copies wipe their own range.
 *
 *   on record     address ->        [bytes]   [0 0 0 0 0 ...]      [bytes]
 *   cudaMemcpy    device to host      [known]  [known]   [zeros: partly off the record]
 *
 * Bytes that another rank sends are on record as the message that brings them: the host waits for it when it reads
 * them, and not at all if they are overwritten unread.
 */
#include "core/ghost.h"

#include <string.h>

#define MOST_BYTES (4 * MIB) /* on record at once, uniform ranges not counted */
#define MOST_RANGES 1024
struct known {
    uint64_t start, size;
    uint64_t age;            /* when it was recorded: the oldest is dropped first */
    unsigned char *bytes;    /* `size` of them, or NULL for a uniform range or a message */
    struct message *message; /* that brings the bytes, or NULL */
    unsigned char byte;      /* of a uniform range */
};

static struct known record[MOST_RANGES]; /* by start; they do not overlap */
static size_t record_length;             /* written with the lock, read without it by launches */
static uint64_t record_bytes, last_age;

/* ---- The record; with the lock held ---------------------------------------------------------- */

static void set_length(size_t length) { __atomic_store_n(&record_length, length, __ATOMIC_RELEASE); }

/* The index of the first range that ends after `address`. */
static size_t first_after(uint64_t address)
{
    size_t low = 0, high = record_length;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (record[middle].start + record[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void drop(size_t at)
{
    if (record[at].bytes)
        record_bytes -= record[at].size;
    free(record[at].bytes);
    free(record[at].message);
    memmove(&record[at], &record[at + 1], (record_length - at - 1) * sizeof *record);
    set_length(record_length - 1);
}

static void drop_oldest(void)
{
    size_t oldest = 0;
    for (size_t i = 1; i < record_length; i++)
        if (record[i].age < record[oldest].age)
            oldest = i;
    drop(oldest);
}

/* Put a range that overlaps nothing on record; `bytes` is copied, or NULL for a uniform range. */
static void insert(uint64_t start, uint64_t size, const unsigned char *bytes, unsigned char byte,
                   uint64_t age)
{
    struct known made = {start, size, age, NULL, NULL, byte};
    if (size == 0)
        return;
    if (bytes) {
        made.bytes = malloc(size);
        if (!made.bytes)
            return;
        memcpy(made.bytes, bytes, size);
        record_bytes += size;
    }
    if (record_length == MOST_RANGES)
        drop_oldest();
    size_t at = first_after(start);
    memmove(&record[at + 1], &record[at], (record_length - at) * sizeof *record);
    record[at] = made;
    set_length(record_length + 1);
    while (record_bytes > MOST_BYTES)
        drop_oldest();
}

/* Make [start, end) unknown and keep what is on either side of it, except of a message. */
static void cut(uint64_t start, uint64_t end)
{
    for (;;) {
        size_t at = first_after(start);
        if (at == record_length || record[at].start >= end)
            return;
        struct known old = record[at];
        unsigned char *bytes = old.bytes;
        uint64_t old_end = old.start + old.size;
        if (old.message) {
            drop(at);
            continue;
        }
        if (bytes)
            record_bytes -= old.size;
        record[at].bytes = NULL; /* kept until its two sides are copied */
        drop(at);
        if (old.start < start)
            insert(old.start, start - old.start, bytes, old.byte, old.age);
        if (old_end > end)
            insert(end, old_end - end, bytes ? bytes + (end - old.start) : NULL, old.byte, old.age);
        free(bytes);
    }
}

/* Copy [start, start + size) into `out` if all of it is on record. */
static bool recall(uint64_t start, uint64_t size, unsigned char *out)
{
    uint64_t end = start + size, at = start;
    for (size_t i = first_after(start); at < end; i++) {
        if (i == record_length || record[i].start > at || record[i].message)
            return false;
        uint64_t until = record[i].start + record[i].size;
        uint64_t length = (until < end ? until : end) - at;
        if (record[i].bytes)
            memcpy(out + (at - start), record[i].bytes + (at - record[i].start), length);
        else
            memset(out + (at - start), record[i].byte, length);
        at += length;
    }
    return true;
}

static void remember(uint64_t start, uint64_t size, const unsigned char *bytes, unsigned char byte)
{
    cut(start, start + size);
    insert(start, size, bytes, byte, ++last_age);
}

/* The first range within [start, end) that a message brings; record_length if there is none. */
static size_t first_message(uint64_t start, uint64_t end)
{
    for (size_t i = first_after(start); i < record_length && record[i].start < end; i++)
        if (record[i].message)
            return i;
    return record_length;
}

/* Put on record what messages bring to [start, end), without the lock while this rank waits for them. */
static void fetch_messages(uint64_t start, uint64_t end)
{
    unsigned char bytes[LONGEST_REMEMBERED];
    for (size_t at; (at = first_message(start, end)) < record_length;) {
        struct known due = record[at];
        struct message message = *due.message;
        ghost_unlock();
        bool known = receive_message(&message, bytes, due.size);
        ghost_lock();
        at = first_after(due.start);
        if (at == record_length || record[at].age != due.age)
            continue; /* another thread has overwritten it */
        drop(at);
        if (known)
            insert(due.start, due.size, bytes, 0, due.age);
    }
}

/* ---- Called by the other files --------------------------------------------------------------- */

static bool nothing_on_record(void) { return __atomic_load_n(&record_length, __ATOMIC_ACQUIRE) == 0; }

void forget_everything(void)
{
    if (nothing_on_record())
        return;
    HOLD_LOCK;
    for (size_t i = 0; i < record_length; i++) {
        free(record[i].bytes);
        free(record[i].message);
    }
    record_bytes = 0;
    set_length(0);
}

void forget(uint64_t address, uint64_t size)
{
    if (nothing_on_record())
        return;
    HOLD_LOCK;
    cut(address, address + size);
}

void remember_copy(uint64_t to, const void *from, uint64_t size)
{
    HOLD_LOCK;
    remember(to, size, from, 0);
}

void remember_fill(uint64_t to, unsigned char byte, uint64_t size)
{
    HOLD_LOCK;
    remember(to, size, NULL, byte);
}

void remember_message(uint64_t to, uint64_t size, const struct message *message)
{
    struct message *kept = malloc(sizeof *kept);
    HOLD_LOCK;
    cut(to, to + size);
    if (kept && size) {
        *kept = *message;
        insert(to, size, NULL, 0, ++last_age);
        record[first_after(to)].message = kept;
    } else
        free(kept);
}

void remember_device_copy(uint64_t to, uint64_t from, uint64_t size)
{
    unsigned char bytes[LONGEST_REMEMBERED];
    if (nothing_on_record())
        return;
    HOLD_LOCK;
    if (recall(from, size, bytes))
        remember(to, size, bytes, 0);
    else
        cut(to, to + size);
}

bool recall_copy(void *to, uint64_t from, uint64_t size)
{
    HOLD_LOCK;
    fetch_messages(from, from + size);
    return recall(from, size, to);
}

void write_result(void *result, size_t size)
{
    forget_everything();
    if (!is_device_address(result))
        memset(result, 0, size);
}
