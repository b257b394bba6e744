/* Memory that libraries work in: how much of it, and where it was.
 *
 * The caller allocates it, here PyTorch through its own allocator, in a size that the library names
 * and passes its address with the call. Both ends are seen here: the size is asked of whoever offered
 * to answer (memfit.ghost.workspaces), and each use is logged, so that the allocation can be told from
 * others in the allocator's history: it has that address and size, and was made under the same label.
 */
#include "ghost.h"

#include <stdlib.h>

static ghost_answerer answerer;

API void ghost_answer_with(ghost_answerer answer) { answerer = answer; }

int ghost_ask(const char *question, struct ghost_configuration *out, int room)
{
    if (answerer) {
        int count = answerer(question, out, room);
        return count < 0 ? 0 : count < room ? count : room;
    }
    ghost_assumed("work space of libraries");
    if (room > 0)
        out[0] = (struct ghost_configuration){0};
    return room > 0;
}

static struct {
    struct ghost_space *uses;
    size_t length, capacity;
} spaces;

static bool grow_spaces(void)
{
    size_t capacity = spaces.capacity ? 2 * spaces.capacity : 256;
    struct ghost_space *larger = realloc(spaces.uses, capacity * sizeof *larger);
    if (!larger)
        return false;
    spaces.uses = larger;
    spaces.capacity = capacity;
    return true;
}

void ghost_space_used(const void *address, uint64_t size)
{
    struct ghost_space use = {(uint64_t)address, size, ghost_label()};
    if (!address || !size)
        return;
    ghost_lock();
    /* A loop without hooks in it would log the same over and over. */
    struct ghost_space *last = spaces.length ? &spaces.uses[spaces.length - 1] : NULL;
    bool again = last && last->address == use.address && last->size == use.size && last->label == use.label;
    if (!again && (spaces.length < spaces.capacity || grow_spaces()))
        spaces.uses[spaces.length++] = use;
    ghost_unlock();
}

API size_t ghost_spaces(struct ghost_space *out, size_t capacity)
{
    ghost_lock();
    for (size_t i = 0; i < spaces.length && i < capacity; i++)
        out[i] = spaces.uses[i];
    size_t length = spaces.length;
    ghost_unlock();
    return length;
}
