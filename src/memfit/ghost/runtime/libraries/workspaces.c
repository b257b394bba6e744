/* Workspaces of libraries: how large they are, and where they were.
 *
 * The caller (PyTorch, through its own allocator) allocates a workspace in the size that the library
 * reports, and passes its address with the call. The ghost sees both: it gets the size from
 * memfit.ghost.workspaces, which registered as the answerer, and logs each use, so that the allocation can
 * be identified in the allocator's history by its address, its size and its label. The sizes that execution
 * plans report are logged as well: PyTorch tries another plan if it runs out of memory for a workspace.
 */
#include "core/ghost.h"

#include "array.h"

static ghost_answerer answerer;

API void ghost_set_answerer(ghost_answerer answer) { answerer = answer; }

int ghost_ask(const char *question, struct ghost_configuration *out, int room)
{
    if (answerer) {
        int count = answerer(question, out, room);
        return count < 0 ? 0 : count < room ? count : room;
    }
    ghost_assumed("library workspaces, 0 bytes");
    if (room > 0)
        out[0] = (struct ghost_configuration){0};
    return room > 0;
}

static struct {
    ARRAY(struct ghost_workspace_use);
} uses;

static void log_use(uint64_t address, uint64_t size)
{
    struct ghost_workspace_use use = {address, size, ghost_label()};
    HOLD_LOCK;
    /* A loop without hooks would log the same use again and again. */
    struct ghost_workspace_use *last = uses.count ? &uses.items[uses.count - 1] : NULL;
    if (last && last->address == use.address && last->size == use.size && last->label == use.label)
        return;
    struct ghost_workspace_use *place = array_append(&uses);
    if (place)
        *place = use;
}

void ghost_workspace_used(const void *address, uint64_t size)
{
    if (address && size)
        log_use((uint64_t)address, size);
}

void ghost_workspace_reported(uint64_t size) { log_use(0, size); }

API size_t ghost_workspace_uses(struct ghost_workspace_use *out, size_t capacity)
{
    HOLD_LOCK;
    for (size_t i = 0; i < uses.count && i < capacity; i++)
        out[i] = uses.items[i];
    return uses.count;
}
